"""The backward of one benchmark layer: implementations that are differentiated, and the peers they are timed beside.

Each is a `Step` whose forward has run and whose graph is kept, so that `Step.gradients` is the backward alone, with the
gradients of x, topk_weights, w_gate_up and w_down. The peers are written for speed in plain PyTorch, and every sum in
them has a fixed order, as the layer's have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Call, Layer, grouped_mm

NAMES = ("x", "topk_weights", "w_gate_up", "w_down")
Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """y [T, H] with its graph, and the tensors of `NAMES` that it is differentiated with respect to."""

    y: Tensor
    leaves: tuple[Tensor, ...]
    dy: Tensor

    def gradients(self) -> Gradients:
        return torch.autograd.grad(self.y, self.leaves, self.dy, retain_graph=True)


def make_leaves(layer: Layer) -> Layer:
    """The same memory, with x and the routing weights asking for gradients as the parameters do."""
    x, topk_weights = (t.detach().requires_grad_() for t in (layer.x, layer.topk_weights))
    return Layer(layer.shape, x, layer.topk_idx, topk_weights, layer.w_gate_up, layer.w_down)


def make_dy(layer: Layer, seed: int = 1) -> Tensor:
    """A gradient of y at order 1."""
    generator = torch.Generator(layer.x.device).manual_seed(seed)
    return torch.randn(layer.x.shape, generator=generator, device=layer.x.device, dtype=layer.x.dtype)


# -- staged PyTorch ----------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """Rows of x in the order of the routes. Backward adds a token's rows: autograd's own would add them atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.place, ctx.top_k = place, top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = grads
        return rows.index_select(0, ctx.place).view(-1, ctx.top_k, rows.shape[1]).sum(1), None, None, None


class _Home(torch.autograd.Function):
    """Rows in the order of the experts -> [T, K, H]. A permutation, and backward is the other one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.order = order
        return rows.index_select(0, place).view(-1, top_k, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (routes,) = grads
        return routes.flatten(0, 1).index_select(0, ctx.order), None, None, None


def _sum_products(o_TKH: Tensor, weights: Tensor) -> Tensor:
    return (o_TKH * weights[..., None]).sum(1).to(o_TKH.dtype)


def _batched_products(o_TKH: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.to(o_TKH.dtype)[:, None], o_TKH)[:, 0]


#: Ways to add a token's rows whose backward is deterministic. The second rounds the routing weights to bfloat16.
COMBINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mul_sum": _sum_products, "bmm": _batched_products}


def torch_staged(layer: Layer, combine: str) -> Tensor:
    """The stages of `layers.torch_staged`, differentiable. Autograd keeps rows of x, h, two products of the activation,
    a, and the rows of o in the order of the routes.
    """
    top_k = layer.shape.top_k
    with torch.no_grad():
        ids, order = layer.topk_idx.flatten().sort(stable=True)
        experts = torch.arange(layer.shape.num_experts, dtype=ids.dtype, device=ids.device)
        ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
    x_rows = _Gather.apply(layer.x, order, place, top_k)
    gate, up = grouped_mm(x_rows, layer.w_gate_up, ends).chunk(2, dim=1)  # whose backward is one concatenation
    o_rows = grouped_mm(F.silu(gate) * up, layer.w_down, ends)
    return COMBINES[combine](_Home.apply(o_rows, order, place, top_k), layer.topk_weights)


# -- all implementations -----------------------------------------------------------------------------------------------


def make_step(layer: Layer, name: str, combine: str, dy: Tensor) -> Step:
    """Runs the forward of that implementation; `combine` is the staged PyTorch one's."""
    given = make_leaves(layer)
    y = torch_staged(given, combine) if name == "torch_staged" else given.forward(name)
    return Step(y, (given.x, given.topk_weights, given.w_gate_up, given.w_down), dy)


def dense(layer: Layer) -> Call:
    """cuBLAS with as many operations: all rows through one expert's weights; no routing, activation or sums of rows."""
    rows, (hidden, width) = layer.topk_idx.numel(), (layer.shape.hidden, layer.shape.width)

    def normal(columns: int) -> Tensor:
        return torch.randn(rows, columns, device=layer.x.device, dtype=layer.x.dtype)

    x_rows, dy_rows, a_rows, dh_rows = normal(hidden), normal(hidden), normal(width), normal(2 * width)

    def call() -> Tensor:
        with torch.no_grad():
            torch.mm(dy_rows, layer.w_down[0])
            torch.mm(dy_rows.t(), a_rows)
            torch.mm(dh_rows.t(), x_rows)
            return torch.mm(dh_rows, layer.w_gate_up[0])

    return call
