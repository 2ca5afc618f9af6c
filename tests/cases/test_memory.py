"""Case A06: rows past the last routed one. What memory held before never reaches a result."""

from __future__ import annotations

import pytest
import torch
from tests.steps import ALL_DTYPES, assert_same_bits, check_step, name_of, run_step

from moe_megakernel.testing import make_inputs, random_routing


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_a06_rows_past_the_last_route(dtype: torch.dtype, recompute: bool) -> None:
    inputs = make_inputs(random_routing(32, 4, 2, drop=0.25, seed=3), bias=True, dtype=dtype)
    assert 0.1 < (inputs.topk_idx < 0).double().mean() < 0.4
    poisoned = check_step(inputs, recompute=recompute)
    for name, tensor in poisoned.items():
        assert tensor is not None, name
        assert tensor.isfinite().all(), name
    assert_same_bits(run_step(inputs, recompute=recompute), poisoned)


def test_a06_pages_full_of_nan() -> None:
    """Buffers of the sizes of a full step are filled with NaN and freed just before."""
    inputs = make_inputs(random_routing(64, 4, 2, drop=0.25, seed=3), bias=True, dtype=torch.float32)
    clean = run_step(inputs)
    for _ in range(3):
        buffers = [torch.full((rows, width), torch.nan) for rows in (64, 128) for width in (32, 64, 128)]
        del buffers
        assert_same_bits(run_step(inputs), clean)
