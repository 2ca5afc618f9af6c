"""Ranks that do not agree: the same clear error on all of them, nothing waits, and the group stays usable."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank

import moe_megakernel
from moe_megakernel import MismatchError, MoEError, RoutingError
from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

pytestmark = pytest.mark.distributed

TOKENS = [3, 5]
TOP_K = 2


def make(hidden: int = 16, expert_width: int = 8, num_experts: int = 4, top_k: int = TOP_K, **options: Any):
    """A batch of eight tokens."""
    options.setdefault("dtype", torch.float32)
    return make_inputs(random_routing(8, num_experts, top_k), hidden, expert_width, num_experts, **options)


#: Name: (what rank 1 does otherwise as arguments of `make`, options of the step, the message after "op: ").
MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden": ({"hidden": 24}, {}, "hidden width of x: expected the same on all ranks, got 16 on rank 0 and 24 on"),
    "expert width": ({"expert_width": 4}, {}, "expert width: expected the same on all ranks"),
    "dtype": ({"dtype": torch.bfloat16}, {}, r"dtype: .* got torch.float32 on rank 0 and torch.bfloat16 on rank 1"),
    "num_experts": ({"num_experts": 5}, {}, "num_experts: .* got 4 on rank 0 and 5 on rank 1"),
    "top_k": ({"top_k": 1}, {}, "top_k: .* got 2 on rank 0 and 1 on rank 1"),
    "activation": ({"activation": "geglu_erf"}, {}, "activation: .*swiglu.* on rank 0 and .*geglu_erf.* on rank 1"),
    "limit": ({"limit": 1.5}, {}, r"activation: .*got swiglu on rank 0 and swiglu\(.*limit=1.5\) on rank 1"),
    "row_capacity": ({}, {"row_capacity": 12}, "row_capacity: .* on rank 0 and 12 on rank 1"),
    "requires_grad": ({}, {"requires_grad": {"w_down": False}}, "inputs that require grad: .*'w_down'. on rank 0 and"),
    "no gradients": (
        {},
        {"requires_grad": dict.fromkeys(("x", "topk_weights", "w_gate_up", "w_down"), False)},
        "inputs that",
    ),
}


def check_mismatch(rank: Rank, case: str) -> None:
    reserve_all(rank, TOKENS, TOP_K)
    arguments, step, message = MISMATCHES[case]
    whole = make(**arguments) if rank.rank == 1 else make()
    for _ in range(2):
        with pytest.raises(MismatchError, match=f"^dispatch_gemm_combine: {message}"):
            group_step(rank, whole, TOKENS, **(step if rank.rank == 1 else {}))
        check_group(rank, make(), TOKENS)


@pytest.mark.parametrize("case", MISMATCHES)
def test_arguments_that_differ(some_ranks, case):
    some_ranks(2).run(check_mismatch, case)


def check_other_calls(rank: Rank) -> None:
    """Every pair of different calls, in either direction."""
    reserve_all(rank, TOKENS, TOP_K)
    inputs = share_of(rank.rank, TOKENS, 4).inputs(make())
    for pair in itertools.permutations(("forward", "backward", "reserve"), 2):
        calls = {
            "forward": lambda: inputs.leaves().call(group_name=rank.name),
            "backward": inputs.leaves().call(group_name=rank.name).sum().backward,
            "reserve": lambda: moe_megakernel.reserve(rank.group, 100, TOP_K),
        }
        with pytest.raises(MismatchError, match=r"expected the same call on all ranks, got .* on rank"):
            calls[pair[rank.rank]]()
        check_group(rank, make(), TOKENS)


def test_one_rank_in_another_call(some_ranks):
    some_ranks(2).run(check_other_calls)


def check_backward_mask(rank: Rank) -> None:
    """Frozen gate_up weights and recompute on one rank only: backward would send x from that rank alone."""
    reserve_all(rank, TOKENS, TOP_K)
    message = "^dispatch_gemm_combine backward: .* expected the same on all ranks"
    with pytest.raises(MismatchError, match=message):
        group_step(rank, make(), TOKENS, requires_grad={"w_gate_up": False}, recompute=rank.rank == 1)
    check_group(rank, make(), TOKENS)
    # Where x travels anyway it is each rank's own choice.
    expected = group_step(rank, make(), TOKENS)
    actual = group_step(rank, make(), TOKENS, recompute=rank.rank == 1)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def test_recompute_on_one_rank(some_ranks):
    some_ranks(2).run(check_backward_mask)


def check_bad_expert(rank: Rank, bad: int, dtype: torch.dtype) -> None:
    tokens = [3, 0, 4, 1]
    reserve_all(rank, tokens, TOP_K)
    whole = make()
    whole = replace(whole, topk_idx=whole.topk_idx.to(dtype))
    broken = replace(whole, topk_idx=whole.topk_idx.clone())
    broken.topk_idx[5, 1] = bad  # token 2 of rank 2
    broken.topk_idx[6, 0] = bad
    message = rf"topk_idx: expected -1 or an expert id in \[0, 4\), got {bad} at topk_idx\[2, 1\] on rank 2"
    for error in (RoutingError, IndexError, MoEError):
        with pytest.raises(error, match=message):
            group_step(rank, broken, tokens)
    check_group(rank, whole, tokens)
    broken.topk_idx[0, 1] = bad
    with pytest.raises(RoutingError, match=r"at topk_idx\[0, 1\] on rank 0"):
        group_step(rank, broken, tokens)
    check_group(rank, whole, tokens)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(4, torch.int64), (-2, torch.int32), (2**31 - 1, torch.int32), (-(2**63), torch.int64)]
)
def test_bad_expert_id_on_one_rank(some_ranks, bad, dtype):
    some_ranks(4).run(check_bad_expert, bad, dtype)


#: Name: (changed fields of rank 1's inputs, options, its own error, its message).
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "shard size": (
        lambda i: {"w_gate_up": i.w_gate_up[:1]},
        {},
        ValueError,
        r"w_gate_up: expected \[L, 2I, H\].*rank 1 of 2 holds L = 2 of 4 experts.*got shape \[1, 16, 16\]",
    ),
    "index dtype": (lambda i: {"topk_idx": i.topk_idx.float()}, {}, TypeError, "topk_idx: expected int32 or int64"),
    "weights dtype": (lambda i: {"w_down": i.w_down.double()}, {}, TypeError, "w_down: expected float32"),
    "activation": (lambda i: {"activation": "gelu"}, {}, ValueError, "activation: expected one of"),
    "row_capacity": (lambda i: {}, {"row_capacity": -7}, ValueError, "row_capacity: expected -1 or at least 0"),
    "backend": (lambda i: {}, {"backend": "mega"}, ValueError, "backend: expected one usable here"),
}


def check_refused(rank: Rank, case: str) -> None:
    """Rank 1 raises its own error, the others are told at once."""
    reserve_all(rank, TOKENS, TOP_K)
    change, options, kind, message = REFUSED[case]
    inputs = share_of(rank.rank, TOKENS, 4).inputs(make())
    if rank.rank == 1:
        with pytest.raises(kind, match=f"^dispatch_gemm_combine: {message}"):
            replace(inputs, **change(inputs)).call(group_name=rank.name, **options)
    else:
        with pytest.raises(MoEError, match=f"rank 1 refused its arguments: {kind.__name__}: .*{message}"):
            inputs.call(group_name=rank.name)
    check_group(rank, make(), TOKENS)


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_refused_on_one_rank(some_ranks, case):
    some_ranks(2).run(check_refused, case)


def check_reserve_arguments(rank: Rank) -> None:
    for arguments, name in (((-1, 2), "max_tokens"), ((1, 0), "top_k"), ((1, 2, -2), "row_capacity")):
        with pytest.raises(ValueError, match=f"^reserve: {name}: expected "):
            moe_megakernel.reserve(rank.group, *arguments)
    assert moe_megakernel.reserve(rank.group, 3 + rank.rank, 1 + rank.rank) == (4, 16)
    assert moe_megakernel.reserve(rank.name, 2, 1, 20 * rank.rank) == (4, 20)
    whole: LayerInputs = make()
    check_group(rank, whole, [4, 4])


def test_reserve(some_ranks):
    some_ranks(2).run(check_reserve_arguments)
