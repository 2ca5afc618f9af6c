"""Waits and raises: they balance, every reader waits for all writers, and ticketed execution gets through.

What tasks read and write is listed here from what the stages mean, without a look at how waits are made.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.cases import ALL_NEEDS, Case, cases, make_case
from tests.plan.execute import FLAGS, Execution
from tests.plan.test_tasks import BIAS_GRADS, WGRADS, column_tiles, needs_act, recomputes

from moe_megakernel.plan import GradNeeds, PlanTables, edges
from moe_megakernel.plan_names import Counter, Direction, Role, Stream, TaskKind

MASKS = st.integers(0, 127)
Place = tuple[int, int, int]  # stream, ticket, block


def totals(plan: PlanTables) -> dict[tuple[int, int], int]:
    out: dict[tuple[int, int], int] = defaultdict(int)
    for _, _, _, _, counter, index, amount in plan.raises.tolist():
        out[(counter, index)] += amount
    return out


@settings(deadline=None, max_examples=60)
@given(case=cases(), mask=MASKS, backward=st.booleans())
def test_targets_are_what_is_raised(case: Case, mask: int, backward: bool) -> None:
    plan = case.plan(Direction(int(backward)), ALL_NEEDS[mask])
    raised = totals(plan)
    for *_, counter, index, target in plan.waits.tolist():
        if counter not in FLAGS:
            assert raised[(counter, index)] == target, (Counter(counter).name, index)
    ranks = list(range(case.config.problem.num_ranks))
    raise_rows, wait_rows = plan.raises.tolist(), plan.waits.tolist()
    for flag in (Counter.PEER_READY, Counter.PEER_DONE):
        assert [row[5:] for row in raise_rows if row[4] == flag] == [[r, 1] for r in ranks]
        for stream, ticket in {(row[0], row[1]) for row in wait_rows if row[4] == flag}:
            awaited = [row[5:] for row in wait_rows if row[4] == flag and row[:2] == [stream, ticket]]
            assert awaited == [[r, 1] for r in ranks]


@settings(deadline=None, max_examples=40)
@given(case=cases(max_tokens=600), mask=MASKS, backward=st.booleans())
def test_every_wait_and_raise_is_an_edge(case: Case, mask: int, backward: bool) -> None:
    plan = case.plan(Direction(int(backward)), ALL_NEEDS[mask])
    known = edges()
    waiters = {(e.counter, e.waiter) for e in known}
    raisers = {(e.counter, e.raiser) for e in known}
    assert {(c, r) for _, _, _, r, c, _, _ in plan.waits.tolist()} <= waiters
    assert {(c, r) for _, _, _, r, c, _, _ in plan.raises.tolist()} <= raisers


@settings(deadline=None, max_examples=40)
@given(case=cases(max_tokens=600), mask=MASKS)
def test_compute_waits_for_no_dy_but_its_experts(case: Case, mask: int) -> None:
    """Weights of rows come with the plan, whatever the number of ranks: what loads no dy does not wait for it."""
    needs = ALL_NEEDS[mask]
    plan = case.plan(Direction.BACKWARD, needs)
    waiters = {Role(role) for _, _, _, role, counter, _, _ in plan.waits.tolist() if counter == Counter.DY_READY}
    loads = needs_act(needs._replace(w_down=False)) and len(plan.tiles) > 0
    assert waiters == ({Role.LOAD} if loads else set())
    assert (Counter.DY_READY, Role.COMPUTE) not in {(e.counter, e.waiter) for e in edges()}


class Accesses:
    """Which blocks of which tickets write and read what: ("a", tile) and so on, and who overwrites whose slot."""

    def __init__(self, case: Case, plan: PlanTables, direction: Direction, needs: GradNeeds) -> None:
        self.writers: dict[tuple[str, int], set[Place]] = defaultdict(set)
        self.readers: dict[tuple[str, int], set[Place]] = defaultdict(set)
        self._case, self._plan, self._forward = case, plan, direction == Direction.FORWARD
        self._recomputes = not self._forward and recomputes(needs)
        self._loads_dy = needs_act(needs._replace(w_down=False))
        for ticket, (kind, source, tile, piece) in enumerate(plan.pulls.tolist()):
            rows = plan.tiles[tile, 2].item() if kind == TaskKind.DISPATCH else 0
            if rows > piece * case.config.tiling.piece_rows:
                self._write((Stream.PULL, ticket, 0), ("x" if self._forward or source else "dy", tile), ("pulled", 0))
        for ticket, (kind, expert, tile, column, paired) in enumerate(plan.tasks.tolist()):
            for block in range(2):
                self._compute(TaskKind(kind), (Stream.COMPUTE, ticket, block), expert, tile, column, paired)

    def _write(self, place: Place, *names: tuple[str, int]) -> None:
        for name in names:
            self.writers[name].add(place)

    def _read(self, place: Place, *names: tuple[str, int]) -> None:
        for name in names:
            self.readers[name].add(place)

    def _compute(self, kind: TaskKind, place: Place, expert: int, tile: int, column: int, paired: int) -> None:
        block = place[2]
        if kind in (TaskKind.GATE_UP, TaskKind.DOWN, TaskKind.DOWN_DGRAD, TaskKind.GATE_UP_DGRAD, *BIAS_GRADS):
            tile, column = (tile, column + block) if paired else (tile + block, column)
            if column >= column_tiles(self._case, kind):
                return
        elif kind not in WGRADS and block:
            return
        own_tiles = range(*self._plan.expert_tiles[expert : expert + 2].tolist())
        if kind == TaskKind.GATE_UP:
            self._read(place, ("x", tile))
            self._write(place, ("a", tile))
        elif kind == TaskKind.DOWN:
            self._read(place, ("a", tile))
            self._write(place, ("home", 0))
        elif kind == TaskKind.DOWN_DGRAD:
            if self._loads_dy:
                self._read(place, ("dy", tile))
            if self._recomputes:
                self._read(place, ("a", tile))
            self._write(place, ("dh", tile))
        elif kind in (TaskKind.ROUTE_GRAD, TaskKind.GATE_UP_DGRAD):
            self._read(place, ("dh", tile))
            self._write(place, ("home", 0))
        elif kind == TaskKind.WGRAD_DOWN:
            self._read(place, *(("dy", t) for t in own_tiles), *(("dh", t) for t in own_tiles))
        elif kind == TaskKind.WGRAD_GATE_UP:
            self._read(place, *(("x", t) for t in own_tiles), *(("dh", t) for t in own_tiles))
        elif kind == TaskKind.BIAS_DOWN:
            self._read(place, *(("dy", t) for t in own_tiles))
        elif kind == TaskKind.BIAS_GATE_UP:
            self._read(place, *(("dh", t) for t in own_tiles))
        elif kind == TaskKind.CLOSE:
            self._read(place, ("home", 0), ("pulled", 0))


def awaited_places(plan: PlanTables) -> dict[Place, set[Place]]:
    """For each ticket's block: the blocks that must have raised before its waits are met."""
    raisers: dict[tuple[int, int], set[Place]] = defaultdict(set)
    for stream, ticket, block, _, counter, index, _ in plan.raises.tolist():
        if counter not in FLAGS:
            raisers[(counter, index)].add((stream, ticket, block))
    raised = totals(plan)
    out: dict[Place, set[Place]] = defaultdict(set)
    for stream, ticket, block, _, counter, index, target in plan.waits.tolist():
        if counter not in FLAGS and target == raised[(counter, index)]:  # else it may pass before all have raised
            out[(stream, ticket, block)] |= raisers[(counter, index)]
    return out


@settings(deadline=None, max_examples=40)
@given(case=cases(max_tokens=900, max_experts=12), mask=MASKS, backward=st.booleans())
def test_readers_wait_for_all_writers(case: Case, mask: int, backward: bool) -> None:
    direction, needs = Direction(int(backward)), ALL_NEEDS[mask]
    plan = case.plan(direction, needs)
    accesses, awaited = Accesses(case, plan, direction, needs), awaited_places(plan)
    for name, readers in accesses.readers.items():
        for reader in readers:
            assert accesses.writers[name] <= awaited[reader], (name, reader)


@settings(deadline=None, max_examples=40)
@given(case=cases(max_tokens=900, max_experts=12), extra=st.integers(0, 3))
def test_slots_are_overwritten_after_their_last_reader(case: Case, extra: int) -> None:
    least = [max(1, slots) + extra for slots in case.plan().ring_minimum.tolist()]
    case = case.with_schedule(x_slots=least[0], a_slots=least[1])
    plan = case.plan()
    accesses, awaited = Accesses(case, plan, Direction.FORWARD, GradNeeds()), awaited_places(plan)
    checked = 0
    for name, slots in zip(("x", "a"), least, strict=True):
        for tile in range(slots, len(plan.tiles)):
            for writer in accesses.writers[(name, tile)]:
                assert accesses.readers[(name, tile - slots)] <= awaited[writer]
                checked += 1
    assert checked or len(plan.tiles) <= min(least)


def run_alone(plan: PlanTables, clusters: int, pullers: int, seed: int) -> bool:
    return Execution([plan], clusters, pullers, alone=True).run(np.random.default_rng(seed))


@pytest.mark.parametrize("clusters", [1, 2, 3, 7])
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), mask=MASKS, backward=st.booleans())
def test_any_number_of_clusters_gets_through(clusters: int, seed: int, mask: int, backward: bool) -> None:
    """At the least ring sizes (slots of 0), whatever the order was made for, and whoever is slow."""
    case = make_case(seed, max_tokens=1000, max_experts=10)
    plan = case.plan(Direction(int(backward)), ALL_NEEDS[mask])
    execution = Execution([plan], clusters, 1 + seed % 3, alone=True)
    assert execution.run(np.random.default_rng(seed))
    raised = totals(plan)
    for (counter, index), value in execution.ranks[0].values.items():
        if counter not in FLAGS:
            assert value == raised[(counter, index)]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), clusters=st.integers(1, 4), backward=st.booleans())
def test_ranks_get_through_together(seed: int, clusters: int, backward: bool) -> None:
    case = make_case(seed, max_ranks=8, max_tokens=300, max_experts=10)
    plans = [
        replace(case, config=case.config.for_rank(rank)).plan(Direction(int(backward)))
        for rank in range(case.config.problem.num_ranks)
    ]
    assert Execution(plans, clusters, 2).run(np.random.default_rng(seed))


def with_ring(plan: PlanTables, case: Case, x_slots: int, a_slots: int) -> PlanTables:
    """A forward plan whose ring waits are rewritten for other sizes, as small as one likes."""
    rows = [row for row in plan.waits.tolist() if row[4] not in (Counter.X_READ, Counter.A_READ)]
    for ticket, (kind, _, tile, piece) in enumerate(plan.pulls.tolist()):
        filled = kind == TaskKind.DISPATCH and plan.tiles[tile, 2] > piece * case.config.tiling.piece_rows
        if filled and tile >= x_slots:
            target = column_tiles(case, TaskKind.GATE_UP)
            rows.append([Stream.PULL, ticket, 0, Role.PULL, Counter.X_READ, tile - x_slots, target])
    for ticket, (kind, _, tile, column, paired) in enumerate(plan.tasks.tolist()):
        for block in range(2):
            place = (tile, column + block) if paired else (tile + block, column)
            real = kind == TaskKind.GATE_UP and place[1] < column_tiles(case, TaskKind.GATE_UP)
            if real and place[0] >= a_slots:
                target = column_tiles(case, TaskKind.DOWN)
                index = place[0] - a_slots
                rows.append([Stream.COMPUTE, ticket, block, Role.COMPUTE, Counter.A_READ, index, target])
    return replace(plan, waits=plan.waits.new_tensor(rows))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_slot_less_gets_stuck(seed: int) -> None:
    """The ring minimum is exact: with one slot less in either ring a single cluster waits for itself."""
    case = make_case(seed, max_tokens=1000, max_experts=10)
    plan = case.plan()
    x_slots, a_slots = plan.ring_minimum.tolist()
    same = with_ring(plan, case, x_slots, a_slots)
    assert sorted(same.waits.tolist()) == sorted(plan.waits.tolist())
    assert run_alone(same, 1, 2, seed)
    if len(plan.tiles):
        assert not run_alone(with_ring(plan, case, x_slots - 1, a_slots), 1, 2, seed)
        assert not run_alone(with_ring(plan, case, x_slots, a_slots - 1), 1, 2, seed)


@pytest.mark.parametrize("counter", [Counter.X_READY, Counter.A_READY, Counter.A_READ, Counter.STORED, Counter.PULLED])
def test_a_dropped_raise_gets_stuck(counter: Counter) -> None:
    """The executions above would notice: one raise less, and somebody waits for ever."""
    case = make_case(11)
    plan = case.plan()
    rows = plan.raises.tolist()
    index = max(row[5] for row in plan.waits.tolist() if row[4] == counter)  # one that somebody waits for
    place = next(i for i, row in enumerate(rows) if row[4] == counter and row[5] == index)
    assert run_alone(plan, 2, 2, 0)
    assert not run_alone(replace(plan, raises=plan.raises.new_tensor(rows[:place] + rows[place + 1 :])), 2, 2, 0)


def test_frozen_tensors_drop_their_tasks() -> None:
    case = make_case(11)
    kinds = {
        needs: {TaskKind(k) for k in case.plan(Direction.BACKWARD, needs).tasks[:, 0].tolist()} for needs in ALL_NEEDS
    }
    assert TaskKind.WGRAD_DOWN not in kinds[GradNeeds(w_down=False)]
    assert TaskKind.WGRAD_GATE_UP not in kinds[GradNeeds(w_gate_up=False)]
    assert TaskKind.GATE_UP_DGRAD not in kinds[GradNeeds(x=False)]
    assert TaskKind.ROUTE_GRAD not in kinds[GradNeeds(topk_weights=False)]
    assert TaskKind.BIAS_DOWN not in kinds[GradNeeds(bias_down=False)]
    assert TaskKind.BIAS_GATE_UP not in kinds[GradNeeds(bias_gate_up=False)]
    assert len(kinds[GradNeeds()]) == 9
    assert kinds[GradNeeds(recompute=True)] == kinds[GradNeeds()] | {TaskKind.GATE_UP}
    bare = {TaskKind.CLOSE, TaskKind.DRAIN}
    assert kinds[ALL_NEEDS[0]] == kinds[ALL_NEEDS[64]] == bare  # nothing, and nothing to recompute h for
    assert kinds[ALL_NEEDS[8]] == bare | {TaskKind.DOWN_DGRAD, TaskKind.WGRAD_DOWN}
    assert kinds[ALL_NEEDS[32]] == kinds[ALL_NEEDS[96]] == bare | {TaskKind.BIAS_DOWN}
