"""What one writes in plain PyTorch: sort, gather, grouped_mm, activation, grouped_mm, weighted sum.

Written for speed, and every sum in it has a fixed order, as the layer's have: autograd's own backward of a gather adds
atomically, so gathers are functions whose backward is a gather and a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..implementation import Bound, Implementation, one_rank, whole_routes
from ..problem import Problem


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [R, k] in groups that end at `ends` int32 [E], times weights [E, n, k] transposed -> [R, n]."""
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return multiply(rows, weights.mT, offs=ends)


class Sorted(NamedTuple):
    """order: [R] routes by expert, in their own order within one; place: [R] where each route went; ends: int32 [E]
    one past the last row of each expert.
    """

    order: Tensor
    place: Tensor
    ends: Tensor


@torch.no_grad()
def sort_routes(topk_idx: Tensor, num_experts: int) -> Sorted:
    """Sorts by expert, without a host sync. Not for routes of -1, which would come first and belong to no group."""
    ids, order = topk_idx.flatten().sort(stable=True)
    experts = torch.arange(num_experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    return Sorted(order, inverse(order), ends)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another: where each element of [R] has gone."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return place


class Gather(torch.autograd.Function):
    """Rows of x in the order of the routes. Backward adds a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = grads
        (place,) = ctx.saved_tensors
        return rows.index_select(0, place).view(-1, ctx.top_k, rows.shape[1]).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows [R, H] in another order. Backward is the other permutation, `inverse(order)`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, undo: Tensor) -> Tensor:
        ctx.save_for_backward(undo)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = grads
        (undo,) = ctx.saved_tensors
        return rows.index_select(0, undo), None, None


def _sum_products(o_TKH: Tensor, weights: Tensor) -> Tensor:
    return (o_TKH * weights[..., None]).sum(1).to(o_TKH.dtype)


def _batched_products(o_TKH: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.to(o_TKH.dtype)[:, None], o_TKH)[:, 0]


#: Ways to add a token's rows whose backward is deterministic. The second rounds the routing weights to bfloat16.
COMBINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mul_sum": _sum_products, "bmm": _batched_products}


def gated(h: Tensor) -> Tensor:
    """silu(gate) * up, of [R, 2I]."""
    gate, up = h.chunk(2, dim=1)  # whose backward is one concatenation
    return F.silu(gate) * up


class TorchStaged(Implementation):
    """The sort of the routes is part of it; the sum is the fastest of `COMBINES`."""

    name = "torch_staged"
    variants = tuple(COMBINES)

    def unfit(self, problem: Problem) -> str:
        return one_rank(problem) or whole_routes(problem)

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        combine, top_k = COMBINES[variant or "mul_sum"], problem.shape.top_k
        topk_idx, num_experts = problem.topk_idx, problem.shape.num_experts

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            order, place, ends = sort_routes(topk_idx, num_experts)
            x_rows = Gather.apply(x, order, place, top_k)
            o_rows = grouped_mm(gated(grouped_mm(x_rows, w_gate_up, ends)), w_down, ends)
            return combine(Permute.apply(o_rows, place, order).unflatten(0, (-1, top_k)), topk_weights)

        return Bound(function, problem.leaves)
