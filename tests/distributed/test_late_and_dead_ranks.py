"""A25: a rank that is late, raises or dies. Every other rank gets an error in time that names op, phase and rank.

The group is then poisoned: calls raise at once, until every rank calls `rebuild`. Tests that kill use processes of
their own.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.pool import KILLED
from tests.distributed.split import check_group, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import run_step

import moe_megakernel
from moe_megakernel import GroupError
from moe_megakernel.distributed import exchange, layer
from moe_megakernel.distributed.exchange import Collective
from moe_megakernel.testing import make_inputs, random_routing

pytestmark = pytest.mark.distributed

#: Seconds that ranks wait for each other in tests where somebody does not come, and that a loaded machine may add.
PATIENCE, SLACK = 4.0, 6.0
OP = "dispatch_gemm_combine"


def make(ranks: int, seed: int = 0):
    return make_inputs(random_routing(8 * ranks, 6, 2, seed=seed), 16, 8, 6, dtype=torch.bfloat16, seed=seed)


def step(rank: Rank, seed: int = 0) -> None:
    check_group(rank, make(rank.ranks, seed), [8] * rank.ranks)


def expect_failure(call: Callable[[], Any], message: str, at_most: float) -> None:
    """`call` must raise a GroupError that matches `message`, within `at_most` seconds."""
    begin = time.monotonic()
    with pytest.raises(GroupError, match=message):
        call()
    seconds = time.monotonic() - begin
    assert seconds < at_most, f"expected an error within {at_most} s, it took {seconds:.1f} s"


def expect_poisoned(rank: Rank, message: str) -> None:
    """Every later call raises at once and says why."""
    for call in (lambda: step(rank), lambda: moe_megakernel.reserve(rank.group, 8, 2)):
        expect_failure(call, f"group {rank.name} is unusable until every rank calls rebuild: .*{message}", 1.0)


def rebuild_and_step(rank: Rank) -> None:
    moe_megakernel.set_timeout(40)
    moe_megakernel.rebuild(rank.group)
    for seed in range(3):
        step(rank, seed)


# -- (a), (b): late ---------------------------------------------------------------------------------------------------


def check_late_but_in_time(rank: Rank) -> None:
    moe_megakernel.set_timeout(PATIENCE + SLACK)
    if rank.rank == 1:
        time.sleep(PATIENCE / 2)
    step(rank)


def test_a25a_late_but_in_time(some_ranks):
    some_ranks(2).run(check_late_but_in_time)


def check_too_late(rank: Rank) -> None:
    step(rank)
    if rank.rank == 1:
        time.sleep(PATIENCE + 2)
        # The others have given up: it must not run into their absence for another whole timeout.
        expect_failure(lambda: step(rank), rf"{OP}: route: .*rank 1 did not arrive within {PATIENCE:g} s", SLACK)
    else:
        moe_megakernel.set_timeout(PATIENCE)
        expect_failure(
            lambda: step(rank), rf"^{OP}: route: .*rank 1 did not arrive within {PATIENCE:g} s", PATIENCE + SLACK
        )
    expect_poisoned(rank, "rank 1 did not arrive within")
    rebuild_and_step(rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a25b_too_late(some_ranks, ranks):
    some_ranks(ranks).run(check_too_late)


def check_too_late_for_backward(rank: Rank) -> None:
    reserve_all(rank, [8, 8], 2)
    leaves = share_of(rank.rank, [8, 8], 6).inputs(make(2)).leaves()
    y = leaves.call(group_name=rank.name)
    if rank.rank == 1:
        time.sleep(PATIENCE + 2)
    else:
        moe_megakernel.set_timeout(PATIENCE)
    expect_failure(y.sum().backward, f"{OP} backward: route: .*rank 1 did not arrive", PATIENCE + SLACK)
    rebuild_and_step(rank)


def check_too_late_for_reserve(rank: Rank) -> None:
    if rank.rank == 1:
        time.sleep(PATIENCE + 2)
    else:
        moe_megakernel.set_timeout(PATIENCE)
    expect_failure(
        lambda: moe_megakernel.reserve(rank.group, 8, 2), "reserve: route: .*rank 1 did not arrive", PATIENCE + SLACK
    )
    rebuild_and_step(rank)


@pytest.mark.slow
def test_a25b_too_late_for_backward_and_reserve(some_ranks):
    some_ranks(2).run(check_too_late_for_backward)
    some_ranks(2).run(check_too_late_for_reserve)


# -- (c): raises before or inside the call ----------------------------------------------------------------------------


def check_raises_before(rank: Rank) -> None:
    """Rank 1 never comes, as after an error in the user's code."""
    step(rank)
    moe_megakernel.set_timeout(PATIENCE)
    if rank.rank != 1:
        expect_failure(lambda: step(rank), f"^{OP}: route: .*rank 1 did not arrive", PATIENCE + SLACK)
    rank.meet()
    rebuild_and_step(rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a25c_raises_before_the_call(some_ranks, ranks):
    some_ranks(ranks).run(check_raises_before)


class Trouble(Exception):
    """What a stage raises in these tests."""


@dataclass(frozen=True)
class Stage:
    """Where rank 1 raises: `owner.name`, on its `call`th call; `mends`: whether `rebuild` can repair the group.

    It cannot where the others are left inside a collective that will never end; then all ranks are told so.
    """

    owner: Any
    name: str
    call: int = 1
    mends: bool = True


STAGES = {
    "gather": Stage(layer, "gather_rows"),
    "dispatch": Stage(Collective, "all_to_all", 1, mends=False),
    "experts": Stage(layer, "experts_forward"),
    "combine": Stage(Collective, "all_to_all", 2, mends=False),
    "sum": Stage(layer, "combine"),
    "backward gather": Stage(layer, "gather_weights"),
    "backward dispatch": Stage(Collective, "all_to_all", 4, mends=False),
    "backward experts": Stage(layer, "experts_backward"),
    "backward combine": Stage(Collective, "all_to_all", 6, mends=False),
}


def check_raises_inside(rank: Rank, where: str) -> None:
    """The others hear of it at their next look, not after the whole timeout, and nobody is left behind."""
    reserve_all(rank, [8] * rank.ranks, 2)
    step(rank)
    stage = STAGES[where]
    kept = getattr(stage.owner, stage.name)
    calls = 0

    def trouble(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stage.call:
            raise Trouble("no luck today")
        return kept(*args, **kwargs)

    share = share_of(rank.rank, [8] * rank.ranks, 6).inputs(make(rank.ranks))
    if rank.rank == 1:
        setattr(stage.owner, stage.name, trouble)
        try:
            with pytest.raises(Trouble):
                run_step(share, group_name=rank.name)
        finally:
            setattr(stage.owner, stage.name, kept)
    else:
        expect_failure(
            lambda: run_step(share, group_name=rank.name), f"^{OP}.*rank 1 raised Trouble: no luck today", SLACK
        )
    expect_poisoned(rank, "rank 1 raised Trouble: no luck today")
    if stage.mends:
        rebuild_and_step(rank)
        return
    refusal = None
    try:
        moe_megakernel.rebuild(rank.group)
    except GroupError as error:
        refusal = str(error)
    if refusal is None:
        # The others had not begun the collective when they heard of the failure: nothing was left behind.
        step(rank)
        return
    assert re.search(r"a collective was left unfinished on ranks? \d.*; make a new process group", refusal)
    expect_poisoned(rank, "")
    other = Rank(rank.rank, rank.ranks, dist.new_group())
    for seed in range(3):
        step(other, seed)
    dist.destroy_process_group(other.group)


@pytest.mark.parametrize("where", STAGES)
def test_a25c_raises_inside_the_call(some_ranks, where):
    some_ranks(2).run(check_raises_inside, where)


@pytest.mark.parametrize("where", ["gather", "dispatch", "experts"])
def test_a25c_raises_inside_the_call_of_four(some_ranks, where):
    some_ranks(4).run(check_raises_inside, where)


def check_interrupt(rank: Rank) -> None:
    """Ctrl-C on rank 0 while it waits in a collective, into which rank 1 is never let."""
    reserve_all(rank, [8, 8], 2)
    step(rank)
    share = share_of(rank.rank, [8, 8], 6).inputs(make(2))
    module, name = (exchange.time, "sleep") if rank.rank == 0 else (layer, "plan_rows")
    kept = getattr(module, name)

    def interrupt(*args: Any) -> None:
        # In the second collective: once the first is over, rank 1 has left the gate and cannot hear of this there.
        frame = sys._getframe(1)
        if frame.f_code.co_name == "_run" and frame.f_locals["phase"] == "dispatch":
            raise KeyboardInterrupt
        kept(*args)

    def trouble(*args: Any) -> None:
        kept_sleep(2)  # longer than rank 0 looks at a collective without a pause
        raise Trouble("no luck today")

    kept_sleep = time.sleep
    setattr(module, name, interrupt if rank.rank == 0 else trouble)
    try:
        with pytest.raises(KeyboardInterrupt if rank.rank == 0 else Trouble):
            run_step(share, group_name=rank.name)
    finally:
        setattr(module, name, kept)
    expect_failure(lambda: moe_megakernel.rebuild(rank.group), "a collective was left unfinished on rank 0", SLACK)


def test_a25_an_interrupt_leaves_a_collective_unfinished(some_ranks):
    some_ranks(2).run(check_interrupt)


def check_rebuild_is_repeated(rank: Rank) -> None:
    """A rebuild that fails because somebody is late changes nothing and can be called again."""
    step(rank)
    moe_megakernel.set_timeout(PATIENCE)
    if rank.rank == 0:
        expect_failure(lambda: step(rank), "rank 1 did not arrive", PATIENCE + SLACK)
        moe_megakernel.set_timeout(1)
        for _ in range(2):
            expect_failure(lambda: moe_megakernel.rebuild(rank.group), "^rebuild: .*rank 1 did not arrive", SLACK)
        expect_poisoned(rank, "rank 1 did not arrive")
    rank.meet()
    rebuild_and_step(rank)


def test_a25_rebuild_is_repeated(some_ranks):
    some_ranks(2).run(check_rebuild_is_repeated)


# -- (d): dies --------------------------------------------------------------------------------------------------------


def _kill(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


#: Where the victim dies: what is replaced by `_kill`, and whether in backward.
DEATHS: dict[str, tuple[Any, str]] = {
    "experts": (layer, "experts_forward"),
    "all-to-all": (Collective, "all_to_all"),
    "backward": (layer, "experts_backward"),
}


def check_death(rank: Rank, victim: int, site: str) -> str:
    """Returns what a live rank was told. The timeout comes from the environment."""
    assert moe_megakernel.get_timeout() == PATIENCE
    for seed in range(2):
        step(rank, seed)
    if rank.rank == victim:
        owner, name = DEATHS[site]
        setattr(owner, name, _kill)
    begin = time.monotonic()
    with pytest.raises(GroupError) as caught:
        step(rank)
    seconds = time.monotonic() - begin
    assert seconds < 2 * PATIENCE + SLACK, f"it took {seconds:.1f} s"
    expect_poisoned(rank, "")
    if victim != 0:
        # A dead rank does not come back: rebuild says so in time, and the living make a group of their own.
        expect_failure(lambda: moe_megakernel.rebuild(rank.group), f"rebuild: .*rank {victim} did not arr", 2 * SLACK)
        living = [r for r in range(rank.ranks) if r != victim]
        group = dist.new_group(living, use_local_synchronization=True)
        others = Rank(living.index(rank.rank), len(living), group)
        moe_megakernel.set_timeout(40)
        for seed in range(2):
            step(others, seed)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("site", "ranks"), [("experts", 3), ("all-to-all", 3), ("backward", 2)])
def test_a25d_a_rank_is_killed(own_ranks, site, ranks):
    pool = own_ranks(ranks, environment={"MOE_MEGAKERNEL_TIMEOUT": f"{PATIENCE:g}"})
    told = pool.run_with_deaths(check_death, 1, site, world=True)
    assert told[1] == KILLED
    phase = {"experts": f"{OP}: combine", "all-to-all": f"{OP}: dispatch", "backward": f"{OP} backward: "}[site]
    for text in (told[0], *told[2:]):
        assert text.startswith(phase), text
        assert "rank 1" in text, text
    pool.leave()


@pytest.mark.parametrize(("site", "ranks"), [("experts", 2), pytest.param("all-to-all", 3, marks=pytest.mark.slow)])
def test_a25d_the_host_of_the_store_is_killed(own_ranks, site, ranks):
    pool = own_ranks(ranks, environment={"MOE_MEGAKERNEL_TIMEOUT": f"{PATIENCE:g}"})
    told = pool.run_with_deaths(check_death, 0, site, world=True)
    assert told[0] == KILLED
    for text in told[1:]:
        assert text.startswith(f"{OP}: {'combine' if site == 'experts' else 'dispatch'}"), text
        assert "rank 0" in text, text
        assert "died" in text, text
    pool.leave()


# -- the end ----------------------------------------------------------------------------------------------------------


def check_fails_and_ends(rank: Rank) -> None:
    """Rank 1 raises while the others are in a collective that waits for it; nobody mends anything."""
    step(rank)
    if rank.rank == 1:
        setattr(*_DISPATCH, _raise)
    with pytest.raises((GroupError, Trouble)):
        step(rank)


_DISPATCH = (Collective, "all_to_all")


def _raise(*args: Any, **kwargs: Any) -> None:
    raise Trouble("no luck today")


def test_processes_end_after_a_failure(own_ranks):
    pool = own_ranks(3)
    pool.run(check_fails_and_ends, world=True)
    pool.leave()
