"""Logs in which further warps of a block combine, under block numbers behind the launch's blocks.

Made from the explorer's logs, in which each block has one pulling agent, by giving combine tickets to such warps.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.proof.cases import busy_case
from tests.proof.library import LOG_FIELDS, Log, check_log, explore_log

from moe_megakernel.plan_names import Counter, Role

BLOCK, ROLE, EVENT, TASK, COUNTER, INDEX, VALUE, TIME = range(len(LOG_FIELDS))
CLAIM, WAIT, RAISE = range(3)
CLUSTERS, WORKERS = 2, 3
BLOCKS = 2 * CLUSTERS
COMBINERS = BLOCKS * WORKERS
Row = list[int]


@cache
def explored(launch: int) -> Log:
    case = busy_case(3, CLUSTERS).with_options(tokens=0, routing=0)
    config = replace(case.config, tiling=replace(case.config.tiling, combine_tokens=4))
    return explore_log(config, case.options, 0, 2, launch, 1)


def combine_tickets(log: Log) -> list[int]:
    """Tickets of the pull stream for which a flag of a peer was awaited."""
    records = log.records
    pulls = (records[:, ROLE] == Role.PULL) & (records[:, COUNTER] == Counter.PEER_DONE) & (records[:, EVENT] == WAIT)
    return sorted(set(records[pulls, TASK].tolist()))


def combined(launch: int) -> Log:
    """The combine tickets of every block dealt to its three workers."""
    log = explored(launch)
    records, tickets = log.records.clone(), combine_tickets(log)
    assert len(tickets) > 4 * COMBINERS
    for position, ticket in enumerate(tickets):
        mine = (records[:, ROLE] == Role.PULL) & (records[:, TASK] == ticket)
        records[mine, BLOCK] += BLOCKS * (1 + position % WORKERS)
    return log._replace(records=records)


def rejected(log: Log, rows: list[Row], combiners: int = COMBINERS) -> str:
    records = torch.tensor(rows, dtype=torch.int64)
    reason = check_log(log._replace(records=records), BLOCKS, combiners)
    assert re.match(r"record -?\d+: expected .+, got .+", reason, re.DOTALL), reason or "accepted"
    return reason


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
def test_workers_are_accepted(launch: int) -> None:
    assert check_log(combined(launch), BLOCKS, COMBINERS) == ""
    assert check_log(explored(launch), BLOCKS, COMBINERS) == "", "workers that never got a ticket"
    assert "block in [0, 4), got" in rejected(combined(launch), combined(launch).records.tolist(), 0)


@pytest.mark.parametrize("launch", [0, 1], ids=["forward", "backward"])
def test_a_lost_or_doubled_record_of_a_worker(launch: int) -> None:
    log = combined(launch)
    rows = log.records.tolist()
    mine = [i for i, row in enumerate(rows) if row[BLOCK] >= BLOCKS]
    for i in mine[:: max(1, len(mine) // 30)]:
        rejected(log, rows[:i] + rows[i + 1 :])
        rejected(log, rows[: i + 1] + rows[i:])


def test_a_worker_does_not_pull_pieces() -> None:
    log = combined(0)
    rows = log.records.tolist()
    ticket = next(row[TASK] for row in rows if row[COUNTER] == Counter.PULLED and row[EVENT] == RAISE)
    for row in rows:
        if row[ROLE] == Role.PULL and row[TASK] == ticket:
            row[BLOCK] += BLOCKS
    assert "a combine ticket claimed by a combining agent" in rejected(log, rows)


def test_a_worker_has_no_other_role() -> None:
    log = combined(0)
    rows = log.records.tolist()
    i = next(i for i, row in enumerate(rows) if row[ROLE] == Role.COMPUTE)
    rows[i][BLOCK] += BLOCKS
    assert "block in [0, 4)" in rejected(log, rows)


def test_a_worker_makes_no_wait_of_its_own_for_the_plan() -> None:
    log = combined(0)
    rows = log.records.tolist()
    start = next(row for row in rows if row[ROLE] == Role.PULL and row[TASK] == -1)
    worker = next(row[BLOCK] for row in rows if row[BLOCK] >= BLOCKS)
    rejected(log, [[worker, *start[1:]], *rows])


def test_a_worker_starts_behind_its_block() -> None:
    log = combined(0)
    rows = log.records.tolist()
    i = next(i for i, row in enumerate(rows) if row[BLOCK] >= BLOCKS and row[EVENT] == CLAIM)
    rows[i][TIME] = 0
    assert "the wait of its block for the plan before" in rejected(log, rows)


def test_a_worker_claims_in_order_and_finishes_a_ticket_before_the_next() -> None:
    log = combined(0)
    rows = log.records.tolist()
    agent = next(row[BLOCK] for row in rows if row[BLOCK] >= BLOCKS)
    mine = [i for i, row in enumerate(rows) if row[BLOCK] == agent]
    claims = [i for i in mine if rows[i][EVENT] == CLAIM]
    assert len(claims) > 1
    early = list(rows)
    early.insert(claims[0] + 1, early.pop(claims[1]))
    assert "a record of ticket" in rejected(log, early)
    others = [row for i, row in enumerate(rows) if i not in mine]
    second = mine.index(claims[1])
    swapped = [rows[i] for i in mine[second:] + mine[:second]]
    assert "tickets claimed in ascending order" in rejected(log, others + swapped)


def test_the_number_of_workers_is_refused_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"moe::check_log: num_combiners: expected 0 to \d+, got -1"):
        check_log(explored(0), BLOCKS, -1)
