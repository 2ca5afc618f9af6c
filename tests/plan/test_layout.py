"""The byte map: against sizes written down here, without overlaps, aligned, and the same for all ranks where shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.cases import Case, cases, expert_begin

from moe_megakernel.plan import PlanConfig, Problem, Schedule, Tiling, make_layout
from moe_megakernel.plan_names import Region

INT32, INT64, FLOAT = 4, 8, 4
ROW_SOURCE, ROW_TILE_ENTRY, SEGMENT, TASK, HEADER, MEETING, LAUNCH = 8, 12, 16, 20, 128, 40, 24
PLAN_SIZES = 72
ALIGNMENT = 256
PLAN_BLOCKS, SHARED_WORDS = 8, 225 * 256  # of the cluster that builds the plan


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def scratch_words(config: PlanConfig, local: int, tiles: int) -> int:
    """Counts by rank; with several ranks positions and runs; segments that are too many for shared memory."""
    p = config.problem
    words = p.num_ranks * p.num_experts
    if p.num_ranks > 1:
        words += p.num_ranks * (p.num_experts + 1)
        words += PLAN_BLOCKS * 2 * (ceil_div(local, PLAN_BLOCKS) * 64 * p.num_ranks + 1)
    if 7 * (local + 1) + 3 + 8 * (tiles + 1) > SHARED_WORDS:
        words += PLAN_BLOCKS * 8 * (tiles + 1)
    return words


def expected_bytes(config: PlanConfig, element: int) -> dict[Region, int]:
    p, t, s = config.problem, config.tiling, config.schedule
    local = expert_begin(p.num_experts, p.num_ranks, p.rank + 1) - expert_begin(p.num_experts, p.num_ranks, p.rank)
    tiles = p.row_capacity // 128 + min(local, p.row_capacity)
    routes = p.max_tokens * p.top_k
    h_columns = p.width * 2 if p.gated else p.width
    h_row, i_row, h2_row = (ceil_div(n * element, 16) * 16 for n in (p.hidden, p.width, h_columns))
    act, hidden = ceil_div(p.width, t.act_columns), ceil_div(p.hidden, t.hidden_columns)
    forward = tiles * (act + hidden) + 2
    wgrads = ceil_div(p.hidden, t.wgrad_rows) * ceil_div(p.width, t.wgrad_columns)
    wgrads += ceil_div(h_columns, t.wgrad_rows) * ceil_div(p.hidden, t.wgrad_columns)
    dgrad = ceil_div(p.width, t.dgrad_columns)
    biases = ceil_div(p.hidden, 256) + ceil_div(h_columns, 256)
    backward = tiles * (act + dgrad + hidden + 1) + local * (wgrads + biases) + 2
    before = 2 * (s.waves * s.num_clusters - 1) // act
    x_slots = min(s.segment_tiles if act > 1 else 2, tiles)
    a_slots = min((s.lag + 1) * (before + s.segment_tiles) + before, tiles)
    if s.separate_stages:
        a_slots = tiles
    per_tile = [tiles] * 6  # x ready, x read, a ready, a read, dy ready, dh ready
    counters = sum(ceil_div(n, 32) * 32 for n in [*per_tile, local, local, local, 1, 1])
    return {
        Region.FLAG_READY: INT64 * p.num_ranks,
        Region.HEADER: HEADER * p.num_ranks,
        Region.FLAG_DONE: INT64 * p.num_ranks,
        Region.ABORT: INT64,
        Region.CLASS_COUNTS: INT32 * 64 * p.num_experts,
        Region.ROUTE_ORDER: INT32 * routes,
        Region.ROUTE_WEIGHTS: FLOAT * routes,
        Region.TOKENS: p.max_tokens * h_row,
        Region.TOKENS_X: p.max_tokens * h_row,
        Region.ROWS: routes * h_row,
        Region.ROUTE_GRADS: FLOAT * routes,
        Region.LAUNCH: LAUNCH,
        Region.TICKETS: 3 * ALIGNMENT,
        Region.COUNTERS: INT32 * counters,
        Region.ALL_CLASS_COUNTS: INT32 * 64 * p.num_experts * p.num_ranks,
        Region.MEETING: MEETING + INT64 * p.num_ranks,
        Region.EXPERT_OFFSETS: INT64 * (local + 1),
        Region.ROW_SOURCES: ROW_SOURCE * p.row_capacity,
        Region.ROW_WEIGHTS: FLOAT * p.row_capacity,
        Region.ROW_TILES: ROW_TILE_ENTRY * tiles,
        Region.SEGMENTS: SEGMENT * tiles,
        Region.MINIBATCH_ENDS: INT32 * tiles,
        Region.EXPERT_TILES: 2 * INT32 * (local + 1),
        Region.TASKS: TASK * max(forward, backward),
        Region.PLAN_SIZES: PLAN_SIZES,
        Region.PLAN_SCRATCH: INT32 * scratch_words(config, local, tiles),
        Region.X_RING: max(1, x_slots) * 128 * h_row,
        Region.A_RING: max(1, a_slots) * 128 * i_row,
        Region.DY_ROWS: tiles * 128 * h_row,
        Region.X_ROWS: tiles * 128 * h_row,
        Region.SCALED_A: tiles * 128 * i_row,
        Region.DH: tiles * 128 * h2_row,
        Region.PARTIALS: tiles * 128 * FLOAT * ceil_div(p.width, 128),
    }


@settings(deadline=None, max_examples=80)
@given(case=cases(max_tokens=600), element=st.sampled_from([1, 2, 4, 8]))
def test_bytes_and_places(case: Case, element: int) -> None:
    layout, expected = make_layout(case.config, element), expected_bytes(case.config, element)
    assert {region: place.bytes for region, place in layout.items()} == expected
    for shared in (True, False):
        places = [place for place in layout.values() if place.shared == shared]
        end = 0
        for place in places:  # no gap but the alignment, no overlap
            assert place.offset % ALIGNMENT == 0
            assert place.offset == ceil_div(end, ALIGNMENT) * ALIGNMENT
            end = place.offset + place.bytes
    assert [r for r, place in layout.items() if place.shared] == list(Region)[: Region.LAUNCH]


@settings(deadline=None, max_examples=40)
@given(case=cases(max_tokens=600))
def test_shared_regions_lie_alike_on_all_ranks(case: Case) -> None:
    """Also where ranks hold different numbers of experts, and where the rings differ."""
    ranks = range(case.config.problem.num_ranks)
    shared = [{r: p for r, p in make_layout(case.config.for_rank(rank)).items() if p.shared} for rank in ranks]
    assert all(places == shared[0] for places in shared)
    more = case.with_schedule(x_slots=2**18, a_slots=2**18, num_clusters=1000).config
    assert {r: p for r, p in make_layout(more).items() if p.shared} == shared[0]


def test_a_plan_of_many_segments_has_scratch_for_them() -> None:
    for capacity in (6000 * 128, 9000 * 128):
        config = PlanConfig(Problem(1, 0, 16, 1, 64, 64, True, capacity, capacity))
        tiles = capacity // 128 + 16
        assert make_layout(config)[Region.PLAN_SCRATCH].bytes == 4 * scratch_words(config, 16, tiles)
    assert make_layout(config)[Region.PLAN_SCRATCH].bytes > 2**21


def test_rings_are_what_is_asked_for() -> None:
    problem = Problem(4, 1, 6, 2, 100, 300, True, 5000, 20000)
    config = PlanConfig(problem, Tiling(), Schedule(num_clusters=4, segment_tiles=4, x_slots=48, a_slots=70))
    layout = make_layout(config)
    assert layout[Region.X_RING].bytes == 48 * 128 * 208  # 100 bf16 are 200 bytes, and rows start at multiples of 16
    assert layout[Region.A_RING].bytes == 70 * 128 * 608
    # 3 act tiles: 2 * (2 * 4 - 1) / 3 = 4 tiles before a closing segment of 4; two minibatches alive, and 4 that join
    with pytest.raises(RuntimeError, match=r"moe::plan_layout: config: expected a_slots >= 20 \(or 0: .*\), got 19"):
        make_layout(PlanConfig(problem, Tiling(), Schedule(num_clusters=4, segment_tiles=4, a_slots=19)))
    with pytest.raises(RuntimeError, match=r"moe::plan_layout: config: expected x_slots >= 4 \(or 0: .*\), got 3"):
        make_layout(PlanConfig(problem, Tiling(), Schedule(num_clusters=4, segment_tiles=4, x_slots=3)))
    with pytest.raises(RuntimeError, match="moe::plan_layout: element: expected 1, 2, 4 or 8 bytes, got 3"):
        make_layout(config, 3)
