"""Row tiles, segments and minibatches: every row in one tile, sizes as promised, order kept.

Recomputed from the rows per expert with plain loops.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.cases import Case, cases, expert_rows, make_case

from moe_megakernel.plan import ROW_TILE, PlanConfig, Problem, Schedule, Tiling, make_layout, make_plan
from moe_megakernel.plan_names import Region


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def gate_up_tasks(tiles: int, columns: int) -> int:
    """Pairs of row tiles for each column, and for an odd tile pairs of columns."""
    return tiles // 2 * columns + tiles % 2 * ceil_div(columns, 2)


def check_tiles(case: Case) -> None:
    config, plan, rows = case.config, case.plan(), expert_rows(case)
    offsets = [0, *np.cumsum(rows).tolist()]
    expected, pieces, first_tile = [], [0], [0]
    for expert, count in enumerate(rows):
        own = [(expert, offsets[expert] + begin, min(ROW_TILE, count - begin)) for begin in range(0, count, ROW_TILE)]
        expected += own
        first_tile.append(len(expected))
        pieces.append(pieces[-1] + sum(ceil_div(r, config.tiling.piece_rows) for _, _, r in own))
    assert plan.tiles.tolist() == [list(t) for t in expected]
    assert plan.expert_tiles.tolist() == first_tile
    assert plan.expert_pieces.tolist() == pieces
    covered = np.concatenate([np.arange(b, b + r) for _, b, r in expected] or [np.zeros(0)])
    np.testing.assert_array_equal(covered, np.arange(sum(rows)))


def check_segments(case: Case) -> None:
    config, plan = case.config, case.plan()
    most = config.schedule.segment_tiles
    expected = []
    for expert, (begin, end) in enumerate(zip(plan.expert_tiles[:-1], plan.expert_tiles[1:], strict=True)):
        expected += [[expert, t, min(most, int(end) - t)] for t in range(int(begin), int(end), most)]
    assert plan.segments[:, :3].tolist() == expected

    columns = ceil_div(config.problem.width, config.tiling.act_columns)
    enough = config.schedule.waves * config.schedule.num_clusters
    tasks = [gate_up_tasks(tiles, columns) for _, _, tiles in expected]
    ends = plan.minibatch_ends.tolist()
    assert (ends[-1:] or [0]) == [len(expected)]
    begins = [0, *ends][: len(ends)]
    for q, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        assert plan.segments[begin:end, 3].tolist() == [q] * (end - begin)
        assert sum(tasks[begin:end]) >= min(enough, sum(tasks))
        if q < len(ends) - 1:  # no longer than needed; what is left over at the end joins the last one
            assert sum(tasks[begin : end - 1]) < enough
        else:
            closed = next((i for i in range(begin, end) if sum(tasks[begin : i + 1]) >= enough), end)
            assert sum(tasks[closed + 1 : end]) < enough


@settings(deadline=None, max_examples=80)
@given(case=cases(max_tokens=4000))
def test_tiles_and_segments(case: Case) -> None:
    check_tiles(case)
    check_segments(case)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_rings_sized_for_any_routing_hold_this_one(seed: int) -> None:
    """The slots that `moe::plan_layout` allocates before routes are known are enough for `moe::plan_tables`."""
    case = make_case(seed, max_tokens=4000)
    p = case.config.problem
    layout = make_layout(case.config, 2)
    pitch = [ceil_div(columns * 2, 16) * 16 for columns in (p.hidden, p.width)]
    regions = (Region.X_RING, Region.A_RING)
    slots = [layout[region].bytes // (ROW_TILE * size) for region, size in zip(regions, pitch, strict=True)]
    case.with_schedule(x_slots=slots[0], a_slots=slots[1]).plan()
    tiles = p.row_capacity // ROW_TILE + min(len(expert_rows(case)), p.row_capacity)
    assert all(1 <= s <= max(tiles, 1) for s in slots)


def test_a_uniform_layer_is_cut_as_computed_by_hand() -> None:
    """4 experts of 300 rows: 3 tiles each, segments of 2 and 1, 2 act columns; 2 waves of 2 clusters are 4 tasks."""
    problem = Problem(1, 0, 4, 1, 64, 256, True, 1200, 1200)
    config = PlanConfig(problem, Tiling(act_columns=128), Schedule(num_clusters=2, waves=2, segment_tiles=2, lag=0))
    counts = torch.zeros(1, 4, 64, dtype=torch.int32)
    counts[0, :, :60] = 5
    plan = make_plan(config, counts, torch.tensor([1200]))
    assert plan.tiles[:4].tolist() == [[0, 0, 128], [0, 128, 128], [0, 256, 44], [1, 300, 128]]
    # Tasks of the segments: 2, 1, 2, 1, ...: minibatches close at 2 + 1 + 2 and 1 + 2 + 1, and the last 2 + 1 join.
    assert plan.minibatch_ends.tolist() == [3, 8]
    assert plan.segments[:4].tolist() == [[0, 0, 2, 0], [0, 2, 1, 0], [1, 3, 2, 0], [1, 5, 1, 1]]
    assert plan.ring_minimum.tolist() == [2, 7]
