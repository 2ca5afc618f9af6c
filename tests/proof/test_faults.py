"""Seeded faults: each is caught by the explorer within a few seeds, on cases that pass without it.

The dependency table is taken apart completely: every raise, every wait and every fence of it is left out in turn.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import pytest
from tests.proof.cases import Case, busy_case
from tests.proof.library import explore, table_faults

#: Seeds within which a fault must be caught.
SEEDS = 8
LAUNCHES = 4

#: What the table could do without, and why: the order is there all the same, by another of its edges.
REDUNDANT = {
    # A dh tile is raised to kDhReady as well, behind the same fence; and load's fence after its next wait, for
    # kExpertDy or kExpertX, comes before its reads.
    "missing_fence:kExpertDh:raiser:kProxyFence",
}
#: Faults beside the table, and what they must be caught as.
NAMED = {
    "ring_below_minimum:x": "deadlock",
    "ring_below_minimum:a": "deadlock",
    "reused_flag": "race|wrong content",
    "reused_flag:kPlanReady": "race|wrong content",
    "reused_flag:kPeerReady": "race|wrong content",
    "reused_flag:kPeerDone": "race|wrong content",
    "gpu_scope_across_ranks": "race",
    "gpu_scope_across_ranks:kPeerReady": "race",
    "gpu_scope_across_ranks:kPeerDone": "race",
    "done_before_last_pull": "race",
    "done_before_stored": "race|wrong content",
    "skip_slot_wait": "race",
    "skip_read_wait": "race",
    "early_next_launch": "race",
    "pull_without_flush": "deadlock",
}


#: Masks of gradients, of which every edge is used by one at least: all of them, all with h recomputed, and dW_down
#: with dbias_down alone, whose down dgrads load no dy.
NEEDS = (0b0111111, 0b1111111, 0b0101000)


def case_for(fault: str, needs: int = NEEDS[0]) -> Case:
    if fault.startswith("ring_below_minimum"):  # more clusters, or a load that runs ahead, may find another way
        return busy_case(clusters=1).with_options(directions=1, load_ahead=0)
    return busy_case().with_options(needs=needs)


@cache
def violation(fault: str, seed: int, needs: int = NEEDS[0]) -> str:
    """What the explorer finds, or an empty string."""
    case = case_for(fault, needs)
    try:
        explore(case.config, case.options, seed, LAUNCHES, fault=fault)
    except RuntimeError as error:
        found = re.search(r"moe::explore: violation: (.*)", str(error), re.DOTALL)
        if found is None:
            raise
        return found.group(1)
    return ""


def first_violation(fault: str) -> str:
    found = (violation(fault, seed, needs) for needs in NEEDS for seed in range(SEEDS))
    return next((text for text in found if text), "")


@pytest.mark.parametrize("fault", ["none", "ring_below_minimum:x"])
def test_the_same_cases_pass_without_a_fault(fault: str) -> None:
    for seed, needs in product(range(SEEDS), NEEDS):
        case = case_for(fault, needs)
        stats = explore(case.config, case.options, seed, LAUNCHES)
        assert stats.row_tiles == 0 or stats.steps > 1000


def test_the_table_is_taken_apart_completely() -> None:
    faults = table_faults()
    assert len(set(faults)) == len(faults) >= 45
    assert set(faults) >= REDUNDANT
    kinds = {fault.split(":")[0] for fault in faults}
    assert kinds == {"drop_raise", "skip_wait", "missing_fence"}


def test_every_raise_wait_and_fence_of_the_table_is_missed() -> None:
    missed = [fault for fault in table_faults() if not first_violation(fault)]
    assert set(missed) == REDUNDANT


@pytest.mark.parametrize("fault", NAMED)
def test_named_faults_are_caught(fault: str) -> None:
    text = first_violation(fault)
    assert re.match(NAMED[fault], text), text or "nothing found"


def test_a_lost_raise_hangs_or_leaves_its_counter_short() -> None:
    for fault in (fault for fault in table_faults() if fault.startswith("drop_raise")):
        counter = fault.split(":")[1]
        text = first_violation(fault)
        assert re.match(r"deadlock after \d+ steps|counter: ", text)
        assert counter in text or text.startswith("deadlock")


@pytest.mark.parametrize("place", ["class counts", "route weights"])
def test_the_next_launch_is_kept_from_what_plans_of_peers_still_read(place: str) -> None:
    """Of peers these are read by plan tasks alone; "done" passes their reads on as it does those of pulls. The route
    order is written behind the class counts, where the same race has been found already."""
    race = rf"overwrites {place}\[0, 0\] of rank \d while the read by rank \d plan is not ordered before"
    assert any(re.search(race, violation("early_next_launch", seed)) for seed in range(40))


def test_violations_say_who_where_and_what() -> None:
    agent = r"rank \d block \d (pull|load|compute) \(launch \d, ticket \d+ [a-z_ ]+ (expert )?\d+.*\)"
    assert re.match(
        rf"race: {agent}, async proxy, overwrites x ring\[\d, \d\] of rank \d while the (read|write) by "
        r"rank \d block \d (bulk writes of pull|TMA loads of load) is not ordered before",
        first_violation("skip_slot_wait"),
    )
    assert re.match(
        rf"race: {agent}, async proxy, reads a ring\[\d, \d\] of rank \d while the write by "
        r"rank \d block \d compute is not ordered before",
        first_violation("missing_fence:kAReady:raiser:kProxyFence"),
    )
    assert re.search(
        rf"{agent} waits for kXRead\[\d+\] of rank \d >= \d, which is \d", first_violation("ring_below_minimum:x")
    )
