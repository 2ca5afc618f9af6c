"""The checker of logs: it accepts what the explorer writes down, and rejects every change of it.

Logs are int64 [N, 8], see kernels/include/moe/plan/log.h; a debug build of the kernels writes the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from tests.proof.cases import busy_case, draw_case
from tests.proof.library import LOG_FIELDS, Log, check_log, explore_log

from moe_megakernel.plan_names import Counter, Role

BLOCK, ROLE, EVENT, TASK, COUNTER, INDEX, VALUE, TIME = range(len(LOG_FIELDS))
CLAIM, WAIT, RAISE = range(3)
RANKS, CLUSTERS, LAUNCHES = 3, 2, 4
FLAGS = (Counter.PLAN_READY, Counter.PEER_READY, Counter.PEER_DONE)
Row = list[int]


@cache
def good(launch: int, rank: int = 1, seed: int = 0) -> Log:
    case = busy_case(RANKS, CLUSTERS).with_options(tokens=0, routing=0)
    return explore_log(case.config, case.options, seed, LAUNCHES, launch, rank)


def check(log: Log) -> str:
    return check_log(log, 2 * CLUSTERS)


def with_rows(log: Log, rows: list[Row] | torch.Tensor) -> Log:
    return log._replace(records=torch.as_tensor(rows, dtype=torch.int64).reshape(-1, len(LOG_FIELDS)))


def change(log: Log, position: int, column: int, value: int) -> torch.Tensor:
    """The log's records with one field replaced."""
    records = log.records.clone()
    records[position, column] = value
    return records


# -- accepted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", range(LAUNCHES))
@pytest.mark.parametrize("rank", range(RANKS))
def test_logs_of_the_explorer_are_accepted(launch: int, rank: int) -> None:
    log = good(launch, rank)
    assert len(log.records) > 150
    assert check(log) == ""


def test_logs_of_random_cases_are_accepted() -> None:
    for seed in range(60):
        case = draw_case(seed)
        for launch in range(2):
            rank = seed % case.config.problem.num_ranks
            log = explore_log(case.config, case.options, seed, 2, launch, rank)
            assert check_log(log, 2 * case.options.clusters) == "", (seed, launch)


def test_order_between_agents_and_order_of_flags_do_not_matter() -> None:
    log = good(0)
    rows = log.records.tolist()
    by_agent = sorted(rows, key=lambda row: (row[BLOCK], row[ROLE]))  # stable: each agent keeps its order
    assert by_agent != rows
    assert check(with_rows(log, by_agent)) == ""
    flags = [i for i, row in enumerate(rows) if row[EVENT] == WAIT and row[COUNTER] == Counter.PEER_READY]
    assert len(flags) == RANKS
    rows[flags[0]], rows[flags[2]] = rows[flags[2]], rows[flags[0]]
    assert check(with_rows(log, rows)) == ""


# -- rejected ----------------------------------------------------------------------------------------------------------


def rejected(log: Log, rows: list[Row] | torch.Tensor) -> str:
    reason = check(with_rows(log, rows))
    assert re.match(r"record -?\d+: expected .+, got .+", reason, re.DOTALL), reason or "accepted"
    return reason


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("event", [CLAIM, WAIT, RAISE], ids=["claim", "wait", "raise"])
def test_a_lost_or_doubled_record(launch: int, event: int) -> None:
    log = good(launch)
    rows = log.records.tolist()
    for i in pick(rows, lambda row: row[EVENT] == event, 40):
        rejected(log, rows[:i] + rows[i + 1 :])
        rejected(log, rows[: i + 1] + rows[i:])


def pick(rows: list[Row], wanted: Callable[[Row], bool], count: int) -> list[int]:
    """Positions of up to `count` rows that are wanted, at random."""
    found = [i for i, row in enumerate(rows) if wanted(row)]
    assert found
    return random.Random(0).sample(found, min(count, len(found)))


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("column", [BLOCK, ROLE, EVENT, TASK, COUNTER, INDEX])
def test_a_wrong_field(launch: int, column: int) -> None:
    log = good(launch)
    rows = log.records.tolist()
    # Which role of a cluster claims a ticket is not laid down.
    for i in pick(rows, lambda row: row[EVENT] != CLAIM or column not in (BLOCK, ROLE), 60):
        for value in (rows[i][column] - 1, rows[i][column] + 1, 12345):
            if value >= -1:
                rejected(log, change(log, i, column, value))


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
def test_a_wrong_value(launch: int) -> None:
    log = good(launch)
    rows = log.records.tolist()
    for i in pick(rows, lambda row: row[EVENT] == RAISE, 40):
        reason = rejected(log, change(log, i, VALUE, rows[i][VALUE] + 1))
        assert "expected a raise of" in reason or "no more than" in reason
    for i in pick(rows, lambda row: row[EVENT] == WAIT, 40):
        assert "that sees" in rejected(log, change(log, i, VALUE, 10**6))
        assert "that sees" in rejected(log, change(log, i, VALUE, -1))


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
def test_another_order_within_an_agent(launch: int) -> None:
    log = good(launch)
    rows = log.records.tolist()
    agents: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        if row[EVENT] != CLAIM and row[ROLE] in (Role.LOAD, Role.COMPUTE):
            agents.setdefault((row[BLOCK], row[ROLE]), []).append(i)
    for positions in agents.values():
        for a, b in pairwise(positions):
            same_flags = rows[a][EVENT] == rows[b][EVENT] and rows[a][COUNTER] == rows[b][COUNTER] in FLAGS
            if rows[a][:VALUE] == rows[b][:VALUE] or same_flags:
                continue
            swapped = list(rows)
            swapped[a], swapped[b] = rows[b], rows[a]
            rejected(log, swapped)


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
def test_a_wait_before_its_raises(launch: int) -> None:
    """Either the wait is stamped too early, or the raise it must have seen too late."""
    log = good(launch)
    rows = log.records.tolist()
    tried = 0
    for i in pick(rows, lambda row: row[EVENT] == WAIT and row[VALUE] > 0, 60):
        wait = rows[i]
        if wait[COUNTER] in (Counter.PEER_READY, Counter.PEER_DONE) and wait[INDEX] != 1:
            continue  # raised on other ranks
        raises = [
            (row[TIME], j)
            for j, row in enumerate(rows)
            if row[EVENT] == RAISE and row[COUNTER : INDEX + 1] == wait[COUNTER : INDEX + 1]
        ]
        needed = sorted(raises)[(1 if wait[COUNTER] in FLAGS else wait[VALUE]) - 1]
        rejected(log, change(log, i, TIME, needed[0] - 1))
        rejected(log, change(log, needed[1], TIME, wait[TIME] + 1))
        tried += 1
    assert tried > 20


def test_a_raise_before_the_waits_of_its_task() -> None:
    log = good(0)
    rows = log.records.tolist()
    for i in pick(rows, lambda row: row[EVENT] == RAISE and row[COUNTER] == Counter.X_READ, 20):
        waits = [
            row[TIME] for row in rows if row[TASK] == rows[i][TASK] and (row[ROLE], row[EVENT]) == (Role.LOAD, WAIT)
        ]
        assert "raises after the waits" in rejected(log, change(log, i, TIME, max(waits) - 1))


def test_a_combine_before_the_last_piece_is_raised() -> None:
    log = good(0)
    rows = log.records.tolist()
    raised = pick(rows, lambda row: row[ROLE] == Role.PULL and row[COUNTER] == Counter.PULLED, 5)
    for i in raised:
        agent = [j for j, row in enumerate(rows) if row[BLOCK] == rows[i][BLOCK] and row[ROLE] == Role.PULL]
        if not any(rows[j][COUNTER] == Counter.PEER_DONE for j in agent):
            continue
        moved = rows[:i] + rows[i + 1 :] + [rows[i]]
        assert "all pieces raised before a combine" in rejected(log, moved)


def test_unknown_records() -> None:
    log = good(0)
    rows = log.records.tolist()
    for column, value, words in (
        (EVENT, 3, r"event in \[0, 3\), got 3"),
        (ROLE, 4, r"role in \[0, 4\), got 4"),
        (COUNTER, 99, r"counter in \[0, \d+\), got 99"),
        (BLOCK, 2 * CLUSTERS, r"block in \[0, \d+\), got 4"),
        (TASK, 10**6, r"task in \[-1, \d+\), got 1000000"),
    ):
        assert re.search(words, rejected(log, change(log, 5, column, value)))
    extra = [0, Role.COMPUTE, RAISE, 0, Counter.STORED, 0, 1, 10**9]
    assert "no further record" in rejected(log, [*rows, extra])
    assert "a claim of compute ticket 0, got none" in rejected(log, [])


def test_another_launch_or_number_of_blocks() -> None:
    log = good(2)
    assert check(log) == ""
    launch = log.launch.clone()
    launch[3] += 1  # the generation
    assert check(log._replace(launch=launch)) != ""
    assert check(good(0)._replace(records=log.records)) != ""
    assert "the end of the agent's records" in check_log(log, 2 * CLUSTERS + 2)


def test_arguments_are_refused_in_words() -> None:
    log = good(0)

    def refuse(pattern: str, num_blocks: int = 4, **changes: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match=pattern):
            check_log(log._replace(**changes), num_blocks)

    refuse(r"moe::check_log: num_blocks: expected an even number from 2 on, got 3", 3)
    refuse(r"moe::check_log: records: expected a contiguous int64 tensor of shape \[N, 8\]", records=log.records[:, :7])
    refuse(r"moe::check_log: records: expected fields in \[-1, \d+\], got -2 in row 0", records=log.records * 0 - 2)
    refuse(r"moe::check_log: launch: expected direction 0 or 1, got 2", launch=torch.tensor([2, 0, 0, 1]))
    refuse(r"moe::check_log: launch: expected needs of 7 bits, got 128", launch=torch.tensor([0, 128, 0, 1]))
    refuse(r"moe::check_log: launch: expected tokens in \[0, 300\], got 301", launch=torch.tensor([0, 0, 301, 1]))
    refuse(r"moe::check_log: launch: expected a contiguous int64 tensor of 4", launch=torch.tensor([0]))
    refuse(
        r"moe::check_log: expert_offsets: expected 0 to 0 for expert 0, got 1",
        expert_offsets=log.expert_offsets * 0 + 1,
    )
    refuse(r"moe::check_log: config: expected a contiguous int64 tensor of 24", config=log.config[:23].clone())
    case = busy_case(RANKS, CLUSTERS)
    with pytest.raises(RuntimeError, match=r"moe::explore_log: launch: expected 0 to 3, got 4"):
        explore_log(case.config, case.options, 0, LAUNCHES, 4, 0)
    with pytest.raises(RuntimeError, match=r"moe::explore_log: rank: expected 0 to 2, got 3"):
        explore_log(case.config, case.options, 0, LAUNCHES, 0, 3)
