"""Errors that all ranks find alike: the step is NaN everywhere, every rank raises, and the group goes on.

Invalid expert ids, batches that do not fit, and ranks that do not agree on a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.dist_gpu.layers import (
    Layer,
    check_bits,
    expect_refused,
    forward,
    forward_of,
    one_rank,
    reserve_for,
    way,
    without_host_sync,
)
from tests.distributed.pool import Pool
from tests.distributed.split import all_rows, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import Results

import moe_megakernel
from moe_megakernel import CapacityError, MismatchError, MoEError, RoutingError
from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

EXPERTS, TOP_K = 9, 2
LAYER = Layer(300, EXPERTS, TOP_K, 64, 40, routing={"drop": 0.1}, options={"bias": True})


def step(rank: Rank, whole: LayerInputs, tokens: list[int], backend: str = "", **options: Any) -> Results:
    backend = backend or way(rank).backends[0]
    return group_step(rank, whole, tokens, transport=way(rank).transport, backend=backend, **options)


def same_on_all(texts: list[str]) -> None:
    """Every rank tells the same story."""
    assert len(set(texts)) == 1, texts


# -- invalid ids ------------------------------------------------------------------------------------------------------


def with_id(whole: LayerInputs, tokens: list[int], rank: int, token: int, value: int) -> LayerInputs:
    """The batch with an id at topk_idx[token, 1] of one rank."""
    idx = whole.topk_idx.clone()
    idx[sum(tokens[:rank]) + token, 1] = value
    return replace(whole, topk_idx=idx)


def check_bad_id(rank: Rank, backend: str, bad: int) -> str:
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    told = ""
    for culprit in (rank.ranks - 1, 0):
        broken = with_id(whole, tokens, culprit, tokens[culprit] - 1, bad)
        match = rf"expert id in \[0, {EXPERTS}\), got {bad} at topk_idx\[{tokens[culprit] - 1}, 1\] on rank {culprit}"
        told += expect_refused(RoutingError, match, lambda broken=broken: step(rank, broken, tokens, backend))
        moe_megakernel.check_errors()  # it is raised once
        for _ in range(2):
            check_bits(rank, whole, tokens, backend, expected=expected)
    return told


@pytest.mark.parametrize("bad", [EXPERTS, -2, 2**40])
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_bad_id_on_one_rank(pool: Pool, backend: str, bad: int) -> None:
    same_on_all(pool.run(check_bad_id, backend, bad, world=True))


def check_raised_by_the_next_call(rank: Rank, backend: str) -> None:
    """No step waits for the error; the first call after the kernel's end raises it, on every rank."""
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    broken = with_id(whole, tokens, 1, 0, EXPERTS)
    mine, good = (share_of(rank.rank, tokens, EXPERTS).inputs(batch) for batch in (broken, whole))
    with torch.no_grad():
        forward(rank, good, backend)
        with without_host_sync(rank):
            y = forward(rank, mine, backend)
        torch.cuda.synchronize()
        assert y.isnan().all()
        with pytest.raises(RoutingError, match=r"at topk_idx\[0, 1\] on rank 1"):
            forward(rank, good, backend)
    check_bits(rank, whole, tokens, backend)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_the_next_call_raises(pool: Pool, backend: str) -> None:
    pool.run(check_raised_by_the_next_call, backend, world=True)


# -- capacity ---------------------------------------------------------------------------------------------------------


def rows_needed(whole: LayerInputs, ranks: int) -> int:
    """The most rows that any rank receives."""
    shares = [moe_megakernel.expert_range(whole.num_experts, r, ranks) for r in range(ranks)]
    return max(int(((whole.topk_idx >= s.start) & (whole.topk_idx < s.stop)).sum()) for s in shares)


def check_too_many_rows(rank: Rank, backend: str) -> str:
    """Fewer rows than the routing needs: asked for in the call, then agreed by `reserve`."""
    whole, tokens = LAYER.batch(rank)
    expected, needed = one_rank(rank, whole), rows_needed(whole, rank.ranks)
    names_both = rf"(?s)row_capacity: (?=.*\b{needed - 1}\b).*\b{needed}\b"
    moe_megakernel.reserve(rank.group, tokens[rank.rank], TOP_K, needed - 1)
    told = expect_refused(CapacityError, names_both, lambda: step(rank, whole, tokens, backend))
    moe_megakernel.reserve(rank.group, tokens[rank.rank], TOP_K, all_rows(tokens, TOP_K))
    check_bits(rank, whole, tokens, backend, expected=expected)
    fewer = {"backend": backend, "row_capacity": needed - 1}
    told += expect_refused(CapacityError, names_both, lambda: step(rank, whole, tokens, **fewer))
    check_bits(rank, whole, tokens, backend, expected=expected, row_capacity=needed)
    return told


@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_more_rows_than_a_rank_has(pool: Pool, backend: str) -> None:
    same_on_all(pool.run(check_too_many_rows, backend))


def check_too_many_tokens(rank: Rank, backend: str) -> str:
    """One rank brings a token more than agreed."""
    tokens = [8] * (rank.ranks - 1) + [9]
    whole = replace(LAYER, tokens=sum(tokens)).batch(rank)[0]
    moe_megakernel.reserve(rank.group, 8, TOP_K, rank.ranks * 9 * TOP_K)
    told = expect_refused(
        CapacityError,
        rf"expected at most 8 tokens on a rank, got 9 on rank {rank.ranks - 1}",
        lambda: step(rank, whole, tokens, backend),
    )
    check_bits(rank, replace(LAYER, tokens=8 * rank.ranks).batch(rank)[0], [8] * rank.ranks, backend)
    moe_megakernel.reserve(rank.group, tokens[rank.rank], TOP_K)
    check_bits(rank, whole, tokens, backend)
    return told


@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_more_tokens_than_agreed(pool: Pool, backend: str) -> None:
    same_on_all(pool.run(check_too_many_tokens, backend))


def check_growth(rank: Rank) -> None:
    """`reserve` for larger batches, one rank asking for all of it; smaller ones run in between."""
    for total in (30, 600, 7, 300):
        whole, tokens = replace(LAYER, tokens=total).batch(rank)
        reserve_all(rank, tokens if total != 600 else [max(tokens)] * rank.ranks, TOP_K)
        check_bits(rank, whole, tokens)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
def test_capacity_grows(pool: Pool) -> None:
    pool.run(check_growth)


# -- ranks that do not agree ------------------------------------------------------------------------------------------

TOKENS = 40


def make(
    rank: Rank, hidden: int = 64, width: int = 40, num_experts: int = EXPERTS, top_k: int = TOP_K, **options: Any
) -> LayerInputs:
    """A batch of as many tokens as every other."""
    inputs = make_inputs(random_routing(TOKENS, num_experts, top_k), hidden, width, num_experts, **options)
    return inputs.to(torch.bfloat16, rank.device)


FROZEN = ("x", "topk_weights", "w_gate_up", "w_down")
#: What the last rank does otherwise: arguments of `make`, frozen inputs, and what the message calls it. All of it fits
#: into the memory of the others' call.
MISMATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "hidden": ({"hidden": 48}, (), "hidden"),
    "expert width": ({"width": 24}, (), "width"),
    "num_experts": ({"num_experts": EXPERTS - 1}, (), "num_experts"),
    "top_k": ({"top_k": 1}, (), "top_k"),
    "activation": ({"activation": "geglu_erf"}, (), "activation"),
    "limit": ({"limit": 1.5}, (), "activation"),
    "requires_grad": ({}, ("w_down",), "grad"),
    "no gradients": ({}, FROZEN, "grad"),
}


def check_mismatch(rank: Rank, backend: str, case: str) -> None:
    tokens = [TOKENS // rank.ranks] * rank.ranks
    arguments, frozen, name = MISMATCHES[case]
    good = make(rank)
    reserve_all(rank, tokens, TOP_K)
    expected = one_rank(rank, good)
    check_bits(rank, good, tokens, backend, expected=expected)
    odd = rank.rank == rank.ranks - 1
    share = share_of(rank.rank, tokens, arguments.get("num_experts", EXPERTS) if odd else EXPERTS)
    mine = share.inputs(make(rank, **arguments) if odd else good)
    for _ in range(2):
        leaves = mine.leaves(**(dict.fromkeys(frozen, False) if odd else {}))
        expect_refused(
            MismatchError,
            rf"(?is){name}.*expected the same on all ranks",
            lambda leaves=leaves: {"y": forward(rank, leaves, backend)},
        )
        check_bits(rank, good, tokens, backend, expected=expected)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("case", MISMATCHES)
def test_arguments_that_differ(pool: Pool, case: str) -> None:
    pool.run(check_mismatch, "mega", case, world=True)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("case", ["hidden", "activation", "requires_grad"])
def test_arguments_that_differ_in_stages(pool: Pool, case: str) -> None:
    pool.run(check_mismatch, "staged", case, world=True)


def check_other_calls(rank: Rank, backend: str) -> None:
    """A rank runs forward where the others run backward, and the other way round."""
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    for odd in (0, rank.ranks - 1):
        for odd_goes_forward in (True, False):
            leaves = share_of(rank.rank, tokens, EXPERTS).inputs(whole).leaves()
            y = forward(rank, leaves, backend)
            if (rank.rank == odd) == odd_goes_forward:
                call = lambda: forward_of(rank, whole, tokens, backend=backend)  # noqa: E731
            else:
                call = lambda: dict(enumerate(torch.autograd.grad(y.sum(), [leaves.x, leaves.w_down])))  # noqa: E731, B023
            expect_refused(MismatchError, "expected the same call on all ranks", call)
            check_bits(rank, whole, tokens, backend, expected=expected)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_forward_against_backward(pool: Pool, backend: str) -> None:
    pool.run(check_other_calls, backend, world=True)


# -- one rank's own arguments -----------------------------------------------------------------------------------------


def check_own_error(rank: Rank, backend: str) -> None:
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    check_bits(rank, whole, tokens, backend, expected=expected)
    for culprit in (rank.ranks - 1, 0):
        if rank.rank == culprit:
            broken = replace(whole, topk_idx=whole.topk_idx.double())
            with pytest.raises(TypeError, match="topk_idx: expected"):
                forward_of(rank, broken, tokens, backend=backend)
            moe_megakernel.check_errors()
        else:
            expect_refused(
                MoEError,
                rf"rank {culprit} refused its arguments",
                lambda: forward_of(rank, whole, tokens, backend=backend),
            )
        check_bits(rank, whole, tokens, backend, expected=expected)


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_one_rank_passes_a_wrong_argument(pool: Pool, backend: str) -> None:
    pool.run(check_own_error, backend, world=True)
