"""The protocol of the plan under interleavings: W ranks, forward and backward launches back to back, and no deadlock,
no race, no wrong row, no wrong count. The explorer raises where one is found; see kernels/proof/explorer.h.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.proof.cases import Case, busy_case, draw_case
from tests.proof.library import SCHEDULERS, Options, Stats, explore

CASES = [draw_case(seed) for seed in range(200)]


def run(case: Case, seed: int, **arguments: object) -> Stats:
    try:
        return explore(case.config, case.options, seed, **arguments)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise AssertionError(f"seed {seed}, {arguments}, {case}") from error


def add(all_stats: list[Stats]) -> Stats:
    return Stats(*(sum(column) for column in zip(*all_stats, strict=True)))


def test_the_cases_are_distinct_and_cover_what_they_should() -> None:
    assert len(set(CASES)) == 200
    options, schedules = [c.options for c in CASES], [c.config.schedule for c in CASES]
    assert {c.config.problem.num_ranks for c in CASES} == set(range(1, 9))
    assert {o.clusters for o in options} == {1, 2, 3, 4}
    assert {s.lag for s in schedules} == {0, 1, 2}
    assert {s.separate_stages for s in schedules} == {False, True}
    assert {(o.x_spare, o.a_spare) for o in options} >= {(0, 0), (0, 2), (2, 0)}


def test_a_million_steps_over_two_hundred_cases() -> None:
    stats = [run(case, seed, launches=4) for seed, case in enumerate(CASES)]
    total = add(stats)
    print(f"\n{len(stats)} cases: {total._replace(x_slots=0, a_slots=0)}")
    assert total.steps >= 1_000_000
    assert total.launches == sum(4 * case.config.problem.num_ranks for case in CASES)
    # Rings turned over, in many cases.
    assert sum(s.x_reuses > 0 for s in stats) > 50
    assert sum(s.a_reuses > 0 for s in stats) > 20
    assert len({(c.config.problem, c.options.clusters, s.x_slots, s.a_slots) for c, s in zip(CASES, stats)}) == 200  # noqa: B905


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_over_two_hundred_cases(scheduler: str) -> None:
    total = add([run(case, 1000 + seed, launches=2, scheduler=scheduler) for seed, case in enumerate(CASES)])
    print(f"\n{scheduler}: {total.steps} steps, {total.accesses} accesses")
    assert total.steps >= 400_000


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_many_launches_back_to_back(scheduler: str) -> None:
    stats = run(busy_case(ranks=8, clusters=3), 7, launches=16, scheduler=scheduler)
    assert stats.launches == 8 * 16


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_cluster_is_enough_with_the_smallest_rings(ranks: int, ahead: int) -> None:
    for seed in range(20):
        case = busy_case(ranks, clusters=1).with_options(load_ahead=ahead, pull_batch=1 + seed % 4)
        run(case, seed, launches=2)


@pytest.mark.parametrize("needs", range(128))
def test_every_mask_of_gradients(needs: int) -> None:
    for seed, (ranks, clusters) in enumerate([(1, 1), (2, 3), (5, 2)]):
        run(busy_case(ranks, clusters).with_options(needs=needs, directions=2), seed, launches=3)


@pytest.mark.parametrize("routing", range(5))
@pytest.mark.parametrize("tokens", range(4))
def test_every_kind_of_routing(routing: int, tokens: int) -> None:
    stats = run(busy_case().with_options(routing=routing, tokens=tokens), 3, launches=4)
    assert (stats.row_tiles == 0) == (routing == 3 or tokens == 3)


def test_more_ranks_than_experts() -> None:
    case = busy_case(ranks=8)
    problem = replace(case.config.problem, num_experts=3)
    case = replace(case, config=replace(case.config, problem=problem))
    run(case, 0, launches=4)


def test_a_run_is_fixed_by_its_seed() -> None:
    case = busy_case()
    assert run(case, 5) == run(case, 5)
    assert run(case, 5) != run(case, 6)
    assert len({run(case, 5, scheduler=scheduler).steps for scheduler in SCHEDULERS}) > 1


def refuse(pattern: str, case: Case, seed: int = 0, **arguments: object) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        explore(case.config, case.options, seed, **arguments)  # type: ignore[arg-type]


def test_arguments_are_refused_in_words() -> None:
    case = busy_case()
    refuse(r"moe::explore: options: expected clusters in \[1, 64\], got 0", case.with_options(clusters=0))
    refuse(r"moe::explore: options: expected needs in \[-1, 127\], got 128", case.with_options(needs=128))
    refuse(r"moe::explore: launches: expected 1 to 1000, got 0", case, launches=0)
    refuse(r"moe::explore: max_steps: expected 1 or more, got 0", case, max_steps=0)
    refuse(r"moe::explore: scheduler: expected uniform, .*, got 'fair'", case, scheduler="fair")
    refuse(r"moe::explore: fault: expected a fault of .*, got 'sabotage'", case, fault="sabotage")
    refuse(
        r"moe::explore: fault: expected the name of a counter, got 'drop_raise:kNone'", case, fault="drop_raise:kNone"
    )
    refuse(r"expected the name of a role, got 'skip_wait:kXRead:raiser'", case, fault="skip_wait:kXRead:raiser")
    refuse(r"expected kBulkWait, .*, got 'missing_fence:kXRead:kPull:no'", case, fault="missing_fence:kXRead:kPull:no")
    refuse(r"expected drop_raise with its arguments, got 'drop_raise'", case, fault="drop_raise")
    small = replace(case.config.problem, row_capacity=10)
    refuse(
        r"moe::explore: config: expected row_capacity >= num_ranks \* max_tokens \* top_k = 2400, got 10",
        replace(case, config=replace(case.config, problem=small)),
    )
    refuse(r"violation: steps: expected the end within 100 steps", case, max_steps=100)


def test_options_are_read_in_the_order_of_the_header() -> None:
    header = (__file__.rsplit("/tests/", 1)[0]) + "/kernels/proof/launches.h"
    with open(header) as file:
        body = re.search(r"struct ExploreOptions \{(.*?)\n\};", file.read(), re.DOTALL)
    assert body is not None
    fields = re.findall(r"^  std::int64_t (\w+);", body.group(1), re.MULTILINE)
    assert fields == list(Options.__dataclass_fields__)
