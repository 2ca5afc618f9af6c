"""The simulated times against the layer's data flow, read from the plan's tasks alone and not from its counters."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from moe_megakernel.plan import GradNeeds
from moe_megakernel.plan_names import TaskKind
from moe_megakernel.simulate import ORDERS, simulate
from moe_megakernel.simulate.layer import make_plans
from moe_megakernel.simulate.routing import draw_counts
from moe_megakernel.simulate.stream import GRADIENTS

from .small import small_options

# What reads rows that another kind of task writes, by row tile.
READS = {TaskKind.DOWN: TaskKind.GATE_UP, TaskKind.ROUTE_GRAD: TaskKind.DOWN_DGRAD}
READS[TaskKind.GATE_UP_DGRAD] = TaskKind.DOWN_DGRAD


@pytest.mark.parametrize("direction", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("order", ORDERS)
def test_tasks_start_after_the_tasks_whose_rows_they_read(
    order: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = dict(READS)
    if direction == "recompute":
        monkeypatch.setattr("moe_megakernel.simulate.layer.NEEDS", GradNeeds(recompute=True))
        reads[TaskKind.DOWN_DGRAD] = TaskKind.GATE_UP
        direction = "backward"
    options = small_options(
        order=order,
        direction=direction,
        tokens=700,
        expected_routing=False,
        comm_sms=20 if order == "sm-split" else -1,
    )
    (layer,) = simulate(options, record=True, exposed=False)
    shape = options.shape
    counts = draw_counts(shape.num_experts, shape.top_k, options.ranks, options.tokens, "uniform", options.seed)
    plans = make_plans(options, direction, counts, layer.costs)
    checked = 0
    for rank, plan in zip(layer.run.ranks, plans, strict=True):
        tasks = [t for t in plan.tasks.tolist() if t[0] not in (TaskKind.CLOSE, TaskKind.DRAIN)]
        spans = {task: (start, end) for task, _, start, end in rank.spans or []}
        written: dict[tuple[int, int], float] = defaultdict(float)  # (kind, row tile) -> end of its last task
        experts: dict[int, float] = defaultdict(float)  # expert -> end of its last down dgrad
        for index, (kind, expert, tile, _, paired) in enumerate(tasks):
            for row_tile in {tile, tile if paired else tile + 1}:
                written[kind, row_tile] = max(written[kind, row_tile], spans[index][1])
            if kind == TaskKind.DOWN_DGRAD:
                experts[expert] = max(experts[expert], spans[index][1])
        for index, (kind, expert, tile, _, paired) in enumerate(tasks):
            start = spans[index][0]
            if kind in reads:
                tiles = {tile} if paired or kind == TaskKind.ROUTE_GRAD else {tile, tile + 1}
                assert start > max(written[reads[TaskKind(kind)], row_tile] for row_tile in tiles)
                checked += 1
            elif kind in GRADIENTS and kind != TaskKind.BIAS_DOWN:  # that one reads dy alone
                assert start > experts[expert]
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("order", ORDERS)
def test_no_tile_is_computed_before_its_rows_can_have_come(order: str) -> None:
    options = small_options(order=order, tokens=700, comm_sms=20 if order == "sm-split" else -1)
    (layer,) = simulate(options, record=True, exposed=False)
    engine = options.hardware.pull_rate_per_warp * options.hardware.sms * 4.0  # no order copies faster
    for rank, stream in zip(layer.run.ranks, layer.streams, strict=True):
        first = min(start for *_, start, _ in rank.spans or [])
        assert first > layer.run.start + stream.pull_bytes[0] / engine
        gate_up = [start for task, _, start, _ in rank.spans or [] if stream.kind[task] == TaskKind.GATE_UP]
        assert np.max(gate_up) > layer.run.start + stream.pull_bytes.sum() / engine
