"""Which group a call runs on: several groups in one process, names, life and death of groups, threads, stores."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import run_step

import moe_megakernel
from moe_megakernel.distributed.group import get_group
from moe_megakernel.testing import assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed


def make(tokens: list[int], seed: int = 0):
    return make_inputs(
        random_routing(sum(tokens), 6, 2, drop=0.1, seed=seed), 24, 8, 6, dtype=torch.bfloat16, seed=seed
    )


def in_group(rank: Rank, members: list[list[int]]) -> Rank:
    """This process's place in the one of these groups that it belongs to; every rank of the world must call it."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if rank.rank in ranks)
    return Rank(dist.get_rank(groups[mine]), len(members[mine]), groups[mine])


def check_disjoint_groups(rank: Rank) -> None:
    """Two groups of two that never meet: different batches, one of them many more steps."""
    pair = in_group(rank, [[0, 3], [1, 2]])
    tokens, steps = ([4, 1], 1) if rank.rank in (0, 3) else ([0, 40], 5)
    reserve_all(pair, tokens, 2)
    for seed in range(steps):
        check_group(pair, make(tokens, seed), tokens)


def check_alternating_groups(rank: Rank) -> None:
    """A rank that works in the whole group and in a pair by turns; backwards in the reverse order."""
    pair = in_group(rank, [[0, 1], [2, 3]])
    wide, narrow = [2, 0, 5, 3], [3, 4]
    reserve_all(rank, wide, 2)
    reserve_all(pair, narrow, 2)
    expected = {"wide": run_step(make(wide)), "narrow": run_step(make(narrow))}
    for _ in range(3):
        check_group(rank, make(wide), wide, expected=expected["wide"])
        check_group(pair, make(narrow), narrow, expected=expected["narrow"])
    first = share_of(rank.rank, wide, 6).inputs(make(wide)).leaves()
    second = share_of(pair.rank, narrow, 6).inputs(make(narrow)).leaves()
    y, z = first.call(group_name=rank.name), second.call(group_name=pair.name)
    (y.sum() + z.sum()).backward()
    one, two = make(wide).leaves(), make(narrow).leaves()
    (one.call().sum() + two.call().sum()).backward()
    for name, grad in first.grads().items():
        assert_equal_bits(grad, share_of(rank.rank, wide, 6).of(name, one.grads()[name]), name)
    for name, grad in second.grads().items():
        assert_equal_bits(grad, share_of(pair.rank, narrow, 6).of(name, two.grads()[name]), name)


def test_several_groups(some_ranks):
    some_ranks(4).run(check_disjoint_groups)
    some_ranks(4).run(check_alternating_groups)


def check_group_of_one(rank: Rank) -> None:
    alone = in_group(rank, [[0], [1]])
    whole = make([7])
    assert moe_megakernel.reserve(alone.group, 7, 2) == (7, 14)
    moe_megakernel.rebuild(alone.group)
    check_group(alone, whole, [7])


def test_a_group_of_one_rank(some_ranks):
    some_ranks(2).run(check_group_of_one)


def check_names(rank: Rank) -> None:
    whole = make([3, 4])
    for name in ("no such group", "999"):
        with pytest.raises(ValueError, match=f"group_name: expected the group_name of a live process group.*{name}"):
            group_step(rank, whole, [3, 4], group_name=name)
        with pytest.raises(ValueError, match="group_name: expected"):
            moe_megakernel.reserve(name, 1, 1)
    for seed in range(3):  # a destroyed group leaves nothing behind for the next one
        other = Rank(rank.rank, rank.ranks, dist.new_group())
        tokens = [3 + seed, 4 + 10 * seed]
        check_group(other, make(tokens, seed), tokens)
        name = other.name
        dist.destroy_process_group(other.group)
        with pytest.raises(ValueError, match=f"group_name: expected .*{name}"):
            group_step(rank, whole, [3, 4], group_name=name)


def test_names_of_groups(some_ranks):
    some_ranks(2).run(check_names)


def check_threads(rank: Rank) -> None:
    """Rank 0 calls from a second thread while its first one waits for rank 1: one error, and no harm."""
    tokens = [3, 4]
    reserve_all(rank, tokens, 2)
    results = {}

    def first() -> None:
        torch.set_num_threads(1)
        results["first"] = group_step(rank, make(tokens), tokens)

    if rank.rank == 0:
        thread = threading.Thread(target=first)
        thread.start()
        while not get_group(rank.name)._lock.locked():
            time.sleep(0.01)
        with pytest.raises(moe_megakernel.GroupError, match="expected one call at a time, got one from a second thr"):
            group_step(rank, make(tokens), tokens)
    rank.meet()
    if rank.rank == 0:
        thread.join()
    else:
        first()
    expected = share_of(rank.rank, tokens, 6).results(run_step(make(tokens)))
    for name, tensor in results["first"].items():
        assert_equal_bits(tensor, expected[name], name)
    check_group(rank, make(tokens), tokens)


def test_two_threads_on_one_group(some_ranks):
    some_ranks(2).run(check_threads)


def check_world(rank: Rank) -> None:
    tokens = [3, 4]
    for seed in range(3):
        check_group(rank, make(tokens, seed), tokens)
    with pytest.raises(moe_megakernel.CapacityError):
        group_step(rank, make([9, 9]), [9, 9])


def test_the_world_group_over_a_file_store(own_ranks, tmp_path):
    pool = own_ranks(2, folder=tmp_path)
    pool.run(check_world, world=True)
    pool.leave()
