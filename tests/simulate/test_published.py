"""The published sweep of rows per minibatch (GB300 NVL72, 64 ranks, SM-split): the simulated ratios to the best point.

An eighth of the ranks and of the experts, so that a rank has the same rows and experts; docs/simulator.md has the
numbers with all 64.
"""

from __future__ import annotations

import pytest

from moe_megakernel.simulate.published import SWEEP_MS, sweep


@pytest.mark.parametrize(("dtype", "tokens"), [("bf16", 2048), ("fp8", 2048)])
def test_ratios_to_the_best_point_are_near_the_published_ones(dtype: str, tokens: int) -> None:
    points = sweep(dtype, tokens, ranks=8, shape="bench-d")
    assert [point.rows for point in points] == list(SWEEP_MS)
    for point in points:
        # At 512 rows less than one wave of tasks is left; docs/simulator.md says what the model lacks there.
        allowed = 0.18 if point.rows == 512 else 0.15
        assert abs(point.error) < allowed, point
    best = min(points, key=lambda point: point.simulated_ms)
    assert best.rows >= 2560
    assert points[0].simulated_ratio > 1.4
