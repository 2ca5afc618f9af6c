"""`torch.library.opcheck` of the ops that talk to other ranks, forward and backward, in a group of two (A18)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.split import share_of
from tests.distributed.worker import Rank
from torch import Tensor
from torch.library import opcheck

import moe_megakernel
from moe_megakernel.schemas import Needs, pack_needs
from moe_megakernel.testing import make_inputs, random_routing

pytestmark = pytest.mark.distributed

TOKENS, EXPERTS, TOP_K = [0, 9], 5, 2


def _check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    results = opcheck(op, args, kwargs or {})
    assert set(results.values()) == {"SUCCESS"}, results


def _strided(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), dim=-1)[..., 0].detach().requires_grad_(tensor.requires_grad)


def check_ops(rank: Rank, hidden: int, dtype: torch.dtype, bias: bool, recompute: bool, trained: bool) -> None:
    rows = rank.ranks * max(TOKENS) * TOP_K
    moe_megakernel.reserve(rank.group, max(TOKENS), TOP_K, rows)
    idx = random_routing(sum(TOKENS), EXPERTS, TOP_K, drop=0.2)
    whole = make_inputs(idx.int() if bias else idx, hidden, 8, EXPERTS, bias=bias, dtype=dtype)
    leaves = share_of(rank.rank, TOKENS, EXPERTS).inputs(whole).leaves(**{} if trained else {"w_down": False})
    tensors = (_strided(leaves.x), leaves.topk_idx, leaves.topk_weights, leaves.w_gate_up, leaves.w_down)
    tensors = (*tensors, leaves.bias_gate_up, leaves.bias_down)
    _check(
        torch.ops.moe.dispatch_gemm_combine.default,
        tensors,
        {"num_experts": EXPERTS, "group_name": rank.name, "recompute": recompute},
    )
    needs = Needs(*(t is not None and t.requires_grad for t in (tensors[0], *tensors[2:])))
    group = (rank.name, "collective", rows)
    options = ("swiglu", 1.0, float("inf"), "reference", pack_needs(needs), recompute)
    arguments = (*tensors, None, None, EXPERTS, *group, *options)
    _check(torch.ops.moe.group_forward.default, arguments)
    with torch.no_grad():
        y, h, anchor, *plan = torch.ops.moe.group_forward(*arguments)
    dy = _strided(torch.randn(y.shape).to(dtype))
    weights = (t if t is None else t.detach() for t in tensors[3:])
    saved = (dy, tensors[0].detach(), leaves.topk_idx, leaves.topk_weights.detach(), *weights, h, anchor)
    _check(torch.ops.moe.group_backward.default, (*saved, *plan, *group, *options))
    # The one that adds into buffers is no part of a trace, and so has no effect to check: schema and fake only.
    main = [
        torch.zeros(w.shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32) for w in tensors[3:5]
    ]
    results = opcheck(
        torch.ops.moe.group_backward_accumulate.default,
        (*saved, *plan, *main, *group, *options),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize(
    ("hidden", "dtype", "bias", "recompute", "trained"),
    [
        (24, torch.float32, True, False, True),
        (7, torch.bfloat16, False, True, True),
        (8, torch.bfloat16, True, False, False),
    ],
)
def test_ops_of_a_group(some_ranks, hidden, dtype, bias, recompute, trained):
    some_ranks(2).run(check_ops, hidden, dtype, bias, recompute, trained)
