"""Ranks that are late, do something else, or die: every other rank raises in time and names them; then `rebuild`.

Run without MPS where ranks share a GPU. Tests that kill use processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.dist_gpu.layers import Layer, check_bits, delay, even, forward, forward_of, one_rank, reserve_for
from tests.distributed.pool import KILLED, Pool
from tests.distributed.split import share_of
from tests.distributed.worker import TIMEOUT, Rank

import moe_megakernel
from moe_megakernel import GroupError, MoEError

pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.usefixtures("_no_mps")]

#: Seconds that ranks wait for each other where somebody does not come, and that may be added: for ranks that take turns
#: on a GPU, and for the others to hear of it.
PATIENCE, SLACK = 4.0, 6.0
LAYER = Layer(96, 6, 2, 64, 40, split=even, options={"bias": True})


def step(rank: Rank, seed: int = 0, backend: str = "") -> None:
    """A step that must be right."""
    whole, tokens = LAYER.batch(rank, seed)
    check_bits(rank, whole, tokens, backend)


def expect_failure(call: Callable[[], object], culprit: int, at_most: float, kind: type[MoEError] = GroupError) -> str:
    """`call`, or the check after it, must raise an error that names the rank, within `at_most` seconds."""

    def call_and_check() -> None:
        call()
        moe_megakernel.check_errors()

    begin = time.monotonic()
    with pytest.raises(kind, match=rf"(?s)\brank {culprit}\b") as caught:
        call_and_check()
    seconds = time.monotonic() - begin
    assert seconds < at_most, f"expected an error within {at_most:g} s, it took {seconds:.1f} s"
    return str(caught.value)


def expect_poisoned(rank: Rank, culprit: int) -> None:
    """Every later call raises at once and says why."""
    whole, tokens = LAYER.batch(rank)
    for _ in range(2):
        text = expect_failure(lambda: forward_of(rank, whole, tokens), culprit, 2.0)
        assert "rebuild" in text, text


def rebuild_and_step(rank: Rank, backend: str) -> None:
    """All ranks are there again: `rebuild`, then bits are right, also after capacities have been agreed anew."""
    moe_megakernel.set_timeout(TIMEOUT)
    moe_megakernel.rebuild(rank.group)
    for seed in range(3):
        step(rank, seed, backend)
    reserve_for(rank, [LAYER.batch(rank)])
    step(rank, 0, backend)


def prepare(rank: Rank, backend: str) -> Callable[[], Any]:
    """Right steps first; returns a forward call, ready to be made while somebody is missing."""
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    for seed in range(2):
        step(rank, seed, backend)
    moe_megakernel.set_timeout(PATIENCE)
    rank.meet()
    return lambda: forward_of(rank, whole, tokens, backend=backend)


# -- late -------------------------------------------------------------------------------------------------------------


def check_late_but_in_time(rank: Rank, backend: str) -> None:
    call = prepare(rank, backend)
    moe_megakernel.set_timeout(PATIENCE + SLACK)
    if rank.rank == 1:
        time.sleep(PATIENCE / 2)
    call()
    moe_megakernel.check_errors()
    step(rank, 1, backend)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_late_but_in_time(pool: Pool) -> None:
    pool.run(check_late_but_in_time, "mega")


def check_sleeps(rank: Rank, backend: str) -> None:
    """Rank 1 comes when the others have given up; it must not wait for them in its turn."""
    call = prepare(rank, backend)
    if rank.rank == 1:
        time.sleep(PATIENCE + 2)
    expect_failure(call, 1, SLACK if rank.rank == 1 else PATIENCE + SLACK)
    expect_poisoned(rank, 1)
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_a_rank_sleeps_too_long(pool: Pool) -> None:
    pool.run(check_sleeps, "mega")


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_rank_sleeps_too_long_for_stages(pool: Pool) -> None:
    pool.run(check_sleeps, "staged")


def check_busy_device(rank: Rank, backend: str) -> None:
    """Rank 1 calls in time, but its stream is busy for longer than the others wait."""
    call = prepare(rank, backend)
    if rank.rank == 1:
        # The clock of no GPU is above 2 GHz by much; where it is half of that, the launch is the later.
        delay(rank, int((PATIENCE + 2) * 2e9))
    expect_failure(call, 1, 3 * PATIENCE + 2 * SLACK if rank.rank == 1 else PATIENCE + SLACK)
    expect_poisoned(rank, 1)
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_device_is_busy_too_long(pool: Pool) -> None:
    pool.run(check_busy_device, "mega")


def check_sleeps_before_backward(rank: Rank, backend: str) -> None:
    prepare(rank, backend)
    whole, tokens = LAYER.batch(rank)
    leaves = share_of(rank.rank, tokens, LAYER.num_experts).inputs(whole).leaves()
    y = forward(rank, leaves, backend)
    moe_megakernel.check_errors()
    if rank.rank == 1:
        time.sleep(PATIENCE + 2)
    expect_failure(y.sum().backward, 1, SLACK if rank.rank == 1 else PATIENCE + SLACK)
    expect_poisoned(rank, 1)
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_rank_sleeps_before_its_backward(pool: Pool) -> None:
    pool.run(check_sleeps_before_backward, "mega")


# -- elsewhere --------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """What the user's code raises in these tests."""


def raises(rank: Rank) -> None:
    raise Trouble


def runs_another_layer(rank: Rank) -> None:
    """One without a group, which meets nobody."""
    whole, _ = LAYER.batch(rank)
    assert one_rank(rank, whole)["y"] is not None


ELSEWHERE = {"raises": raises, "runs another op": runs_another_layer}


def check_never_comes(rank: Rank, backend: str, instead: str) -> None:
    call = prepare(rank, backend)
    if rank.rank == 1:
        with contextlib.suppress(Trouble):
            ELSEWHERE[instead](rank)
    else:
        expect_failure(call, 1, PATIENCE + SLACK)
        expect_poisoned(rank, 1)
    rank.meet()
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_a_rank_raises_before_the_call(pool: Pool) -> None:
    pool.run(check_never_comes, "mega", "raises")


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_rank_runs_another_op(pool: Pool) -> None:
    pool.run(check_never_comes, "mega", "runs another op")


def check_reserves_instead(rank: Rank, backend: str) -> None:
    """Rank 1 waits for the others in `reserve`, they for it in the layer: nobody waits for longer than the timeout."""
    call = prepare(rank, backend)
    if rank.rank == 1:
        with pytest.raises(MoEError, match=r"\brank 0\b|same call"):
            moe_megakernel.reserve(rank.group, 200, LAYER.top_k)
    else:
        expect_failure(call, 1, PATIENCE + SLACK, MoEError)
    rank.meet()
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_rank_is_in_reserve(pool: Pool) -> None:
    pool.run(check_reserves_instead, "mega")


def check_rebuild_is_repeated(rank: Rank, backend: str) -> None:
    """A rebuild to which a rank is late raises and can be called again."""
    call = prepare(rank, backend)
    if rank.rank != 1:
        expect_failure(call, 1, PATIENCE + SLACK)
        moe_megakernel.set_timeout(1.0)
        expect_failure(lambda: moe_megakernel.rebuild(rank.group), 1, SLACK)
    rank.meet()
    rebuild_and_step(rank, backend)


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_a_rank_is_late_to_rebuild(pool: Pool) -> None:
    pool.run(check_rebuild_is_repeated, "mega")


# -- dead -------------------------------------------------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def check_death(rank: Rank, victim: int, site: str) -> str:
    """Returns what a live rank was told. `site`: where the victim is when it is killed."""
    call = prepare(rank, "mega")
    if site == "backward":
        whole, tokens = LAYER.batch(rank)
        y = forward(rank, share_of(rank.rank, tokens, LAYER.num_experts).inputs(whole).leaves())
        moe_megakernel.check_errors()
        call = y.sum().backward
        rank.meet()
    if rank.rank == victim:
        if site == "kernel":
            call()  # waits on the device for the others, who come after its death
            time.sleep(0.5)
        _die()
    if site == "kernel":
        time.sleep(1.0)
    told = expect_failure(call, victim, PATIENCE + SLACK)
    expect_poisoned(rank, victim)
    # A dead rank does not come back: rebuild says so in time, and the living make a group of their own.
    moe_megakernel.set_timeout(1.0)
    expect_failure(lambda: moe_megakernel.rebuild(rank.group), victim, SLACK)
    living = [r for r in range(rank.ranks) if r != victim]
    moe_megakernel.set_timeout(TIMEOUT)
    if len(living) > 1:
        group = dist.new_group(living, use_local_synchronization=True)
        others = Rank(living.index(rank.rank), len(living), group, rank.device)
        for seed in range(2):
            step(others, seed)
    else:
        assert one_rank(rank, LAYER.batch(rank)[0])["y"] is not None
        torch.cuda.synchronize()
        moe_megakernel.check_errors()
    return told


@pytest.mark.parametrize(("ranks", "site"), [(2, "kernel"), (4, "kernel"), (4, "backward")])
def test_a_rank_is_killed(own_ranks: Callable[..., Pool], ranks: int, site: str) -> None:
    told = own_ranks(ranks).run_with_deaths(check_death, 1, site, world=True)
    assert told[1] == KILLED
    assert KILLED not in (told[0], *told[2:]), told
