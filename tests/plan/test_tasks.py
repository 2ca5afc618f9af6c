"""The streams of tasks: every tile of every GEMM once, in the order that the schedule promises.

Expected work is listed from the tile table with plain loops; nothing here knows how the streams are generated.
"""

from __future__ import annotations

from collections import Counter as Multiset

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.cases import ALL_NEEDS, Case, cases, make_case

from moe_megakernel.plan import GradNeeds, PlanTables
from moe_megakernel.plan_names import Direction, TaskKind

TILE_KINDS = (TaskKind.GATE_UP, TaskKind.DOWN, TaskKind.DOWN_DGRAD, TaskKind.GATE_UP_DGRAD)
WGRADS = (TaskKind.WGRAD_DOWN, TaskKind.WGRAD_GATE_UP)
BIAS_GRADS = (TaskKind.BIAS_DOWN, TaskKind.BIAS_GATE_UP)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def column_tiles(case: Case, kind: TaskKind) -> int:
    p, t = case.config.problem, case.config.tiling
    if kind in BIAS_GRADS:
        return ceil_div(p.hidden if kind == TaskKind.BIAS_DOWN else p.width * (2 if p.gated else 1), 256)
    if kind in WGRADS:
        return ceil_div(p.width if kind == TaskKind.WGRAD_DOWN else p.hidden, t.wgrad_columns)
    if kind == TaskKind.GATE_UP:
        return ceil_div(p.width, t.act_columns)
    if kind == TaskKind.DOWN_DGRAD:
        return ceil_div(p.width, t.dgrad_columns)
    return ceil_div(p.hidden, t.hidden_columns)


def row_tiles_of_weight(case: Case, kind: TaskKind) -> int:
    p = case.config.problem
    if kind in BIAS_GRADS:
        return 1
    rows = p.hidden if kind == TaskKind.WGRAD_DOWN else p.width * (2 if p.gated else 1)
    return ceil_div(rows, case.config.tiling.wgrad_rows)


def needs_act(needs: GradNeeds) -> bool:
    """Whether anything needs a or what lies behind it: all but dbias_down."""
    return needs.x or needs.topk_weights or needs.w_gate_up or needs.w_down or needs.bias_gate_up


def recomputes(needs: GradNeeds) -> bool:
    return needs.recompute and needs_act(needs)


def done_tiles(case: Case, plan: PlanTables) -> Multiset[tuple[int, ...]]:
    """(kind, expert, tile, column) of every tile that some block computes."""
    done: Multiset[tuple[int, ...]] = Multiset()
    for kind, expert, tile, column, paired in plan.tasks.tolist():
        if kind not in TILE_KINDS + WGRADS + BIAS_GRADS:
            done[(kind, expert, tile, column)] += 1
            continue
        columns = column_tiles(case, TaskKind(kind))
        for block in range(2):
            place = (tile, column + block) if paired else (tile + block, column)
            if place[1] < columns:
                done[(kind, expert, *place)] += 1
            else:
                assert block == 1  # the first block of a pair always has work
    return done


def expected_tiles(case: Case, plan: PlanTables, direction: Direction, needs: GradNeeds) -> Multiset[tuple[int, ...]]:
    todo: Multiset[tuple[int, ...]] = Multiset()
    todo[(TaskKind.CLOSE, 0, 0, 0)] += 1
    todo[(TaskKind.DRAIN, 0, 0, 0)] += 1
    if direction == Direction.FORWARD:
        kinds = [TaskKind.GATE_UP, TaskKind.DOWN]
    else:
        kinds = [TaskKind.GATE_UP] * recomputes(needs) + [TaskKind.DOWN_DGRAD] * needs_act(needs)
        kinds += [TaskKind.GATE_UP_DGRAD] * needs.x
    for tile, (expert, _, _) in enumerate(plan.tiles.tolist()):
        for kind in kinds:
            for column in range(column_tiles(case, kind)):
                todo[(kind, expert, tile, column)] += 1
        if direction == Direction.BACKWARD and needs.topk_weights:
            todo[(TaskKind.ROUTE_GRAD, expert, tile, 0)] += 1
    if direction == Direction.BACKWARD:
        asked = (needs.w_down, needs.w_gate_up, needs.bias_down, needs.bias_gate_up)
        for kind in (kind for kind, need in zip(WGRADS + BIAS_GRADS, asked, strict=True) if need):
            for expert in range(len(plan.expert_offsets) - 1):  # experts without rows too: their gradient is zero
                for row in range(row_tiles_of_weight(case, kind)):
                    for column in range(column_tiles(case, kind)):
                        todo[(kind, expert, row, column)] += 1
    return todo


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_forward_computes_every_tile_once(case: Case) -> None:
    plan = case.plan()
    assert done_tiles(case, plan) == expected_tiles(case, plan, Direction.FORWARD, GradNeeds())


@pytest.mark.parametrize("needs", ALL_NEEDS, ids=lambda n: "".join("x" if need else "-" for need in n))
@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32 - 1))
def test_backward_computes_every_tile_once(needs: GradNeeds, seed: int) -> None:
    case = make_case(seed, max_experts=8)
    plan = case.plan(Direction.BACKWARD, needs)
    assert done_tiles(case, plan) == expected_tiles(case, plan, Direction.BACKWARD, needs)


def minibatch_of_tiles(plan: PlanTables) -> np.ndarray:
    out = np.zeros(len(plan.tiles), dtype=np.int64)
    for _, begin, tiles, minibatch in plan.segments.tolist():
        out[begin : begin + tiles] = minibatch
    return out


@settings(deadline=None, max_examples=60)
@given(case=cases(), backward=st.booleans(), recompute=st.booleans())
def test_order(case: Case, backward: bool, recompute: bool) -> None:
    """First stages of minibatch q + lag before the second stages of q, and these before the first of q + lag + 1."""
    plan = case.plan(Direction(int(backward)), GradNeeds(recompute=recompute))
    minibatch = minibatch_of_tiles(plan)
    count = len(plan.minibatch_ends)
    lag = count if case.config.schedule.separate_stages else case.config.schedule.lag
    stages = [[TaskKind.GATE_UP], [TaskKind.DOWN]]
    if backward:
        stages = [[TaskKind.DOWN_DGRAD], [TaskKind.ROUTE_GRAD, TaskKind.GATE_UP_DGRAD]]
    if backward and recompute:
        stages = [[TaskKind.GATE_UP], *stages]
    place = {kind: (i, j) for i, stage in enumerate(stages) for j, kind in enumerate(stage)}
    # The steps of the pipeline: in step s the first stage works on minibatch s, then the second on s - lag, and so on.
    steps = []
    for kind, _, tile, _, _ in plan.tasks.tolist():
        if kind in place:
            stage, rank = place[TaskKind(kind)]
            steps.append((int(minibatch[tile]) + stage * lag, stage, rank))
    assert steps == sorted(steps)
    kinds = plan.tasks[:, 0].tolist()
    tail = [*BIAS_GRADS, *WGRADS] if backward else []
    rest = [k for k in kinds if k not in place]
    assert rest == sorted(rest, key=[TaskKind.CLOSE, *tail, TaskKind.DRAIN].index)
    assert kinds[len(steps)] == TaskKind.CLOSE


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_weight_tiles_are_shared_by_neighbours(case: Case) -> None:
    """Inside a segment all row tiles of one column follow each other; columns ascend (an odd last tile takes two)."""
    plan = case.plan()
    segment = np.zeros(len(plan.tiles), dtype=np.int64)
    for s, (_, begin, tiles, _) in enumerate(plan.segments.tolist()):
        segment[begin : begin + tiles] = s
    for kind in (TaskKind.GATE_UP, TaskKind.DOWN):
        keys = [(int(segment[tile]), column, tile) for k, _, tile, column, _ in plan.tasks.tolist() if k == kind]
        assert keys == sorted(keys)


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_weight_gradients_go_expert_by_expert_in_segments(case: Case) -> None:
    """As tile tasks: all row tiles of a segment for one column, then the next column."""
    tasks = case.plan(Direction.BACKWARD, GradNeeds()).tasks.tolist()
    most = case.config.schedule.wgrad_tiles
    for kind in WGRADS:
        keys = [(expert, row // most, column, row) for k, expert, row, column, _ in tasks if k == kind]
        assert keys == sorted(keys)


@settings(deadline=None, max_examples=60)
@given(case=cases(), mask=st.integers(0, 127), backward=st.booleans())
def test_pull_stream(case: Case, mask: int, backward: bool) -> None:
    needs, direction = ALL_NEEDS[mask], Direction(int(backward))
    plan = case.plan(direction, needs)
    tiles = len(plan.tiles)
    pieces = 128 // case.config.tiling.piece_rows
    sources = [0]
    if backward:
        sources = [0] * (needs_act(needs) or needs.bias_down) + [1] * (needs.w_gate_up or recomputes(needs))
    places = [(source, tile) for source in sources for tile in range(tiles)]
    if backward and recomputes(needs):  # x for gate_up first, then dy for the down dgrad, tile by tile
        places = [(source, tile) for tile in range(tiles) for source in (1, 0)]
    pulls = [[TaskKind.DISPATCH, *place, piece] for place in places for piece in range(pieces)]
    tokens = int(case.tokens[case.config.problem.rank])
    if not backward or needs.x or needs.topk_weights:
        blocks = ceil_div(tokens, case.config.tiling.combine_tokens)
        pulls += [[TaskKind.COMBINE, 0, block, 0] for block in range(blocks)]
    assert plan.pulls.tolist() == pulls
