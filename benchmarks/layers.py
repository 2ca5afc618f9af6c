"""One benchmark layer in memory: inputs of a named shape and a routing, and the implementations that are timed on them.

Every implementation is a call without arguments that returns y in bfloat16 and keeps h as training does. The peers are
written for speed in plain PyTorch; what they leave out or add beside the layer is said at each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import moe_megakernel  # noqa: F401  (registers the ops)
from moe_megakernel.shapes import Shape

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Layer:
    """x [T, H], topk_idx int32 [T, K], topk_weights fp32 [T, K], w_gate_up [E, 2I, H], w_down [E, H, I]."""

    shape: Shape
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor

    def forward(self, backend: str) -> Tensor:
        """The library's layer; the parameters ask for gradients, so h is kept."""
        return torch.ops.moe.dispatch_gemm_combine(
            self.x,
            self.topk_idx,
            self.topk_weights,
            self.w_gate_up,
            self.w_down,
            num_experts=self.shape.num_experts,
            backend=backend,
        )


def make_layer(shape: Shape, routing: str, device: str = "cuda", seed: int = 0) -> Layer:
    """Values of order 1, made on the device.

    Args:
        shape: with its number of tokens.
        routing: "uniform": each token's experts are the top k of Gaussian logits; "zipf": of logits that prefer expert
            e with a probability proportional to 1 / (e + 1), in a shuffled order.
        device, seed: of the tensors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens, experts = shape.tokens, shape.num_experts
    assert tokens is not None

    def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    if routing == "uniform":
        logits = normal(tokens, experts, dtype=torch.float32)
    elif routing == "zipf":
        order = torch.randperm(experts, generator=generator, device=device)
        popularity = torch.arange(1, experts + 1, device=device).float().log()[order]
        noise = torch.rand(tokens, experts, generator=generator, device=device).clamp(1e-7, 1 - 1e-7)
        logits = -(-noise.log()).log() - popularity
    else:
        raise ValueError(f"make_layer: routing: expected uniform or zipf, got {routing!r}")
    values, ids = logits.topk(shape.top_k)
    return Layer(
        shape,
        normal(tokens, shape.hidden),
        ids.int(),
        values.softmax(-1),
        normal(experts, 2 * shape.width, shape.hidden).mul_(shape.hidden**-0.5).requires_grad_(),
        normal(experts, shape.hidden, shape.width).mul_(shape.width**-0.5).requires_grad_(),
    )


# -- staged PyTorch ----------------------------------------------------------------------------------------------------


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [R, k] in groups that end at `ends` int32 [E], times weights [E, n, k] transposed -> [R, n]."""
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return multiply(rows, weights.mT, offs=ends)


def _sum_products(o_rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    o_TKH = o_rows.index_select(0, place).view(*weights.shape, -1)
    return (o_TKH * weights[..., None]).sum(1).to(o_rows.dtype)


def _batched_products(o_rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    o_TKH = o_rows.index_select(0, place).view(*weights.shape, -1)
    return torch.bmm(weights.to(o_rows.dtype)[:, None], o_TKH)[:, 0]


def _embedding_bag(o_rows: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    bags = place.view(weights.shape)
    return F.embedding_bag(bags, o_rows, per_sample_weights=weights.to(o_rows.dtype), mode="sum")


#: Ways to bring rows home and add them, all deterministic. The last two round the routing weights to bfloat16.
COMBINES = {"mul_sum": _sum_products, "bmm": _batched_products, "embedding_bag": _embedding_bag}


def torch_staged(layer: Layer, combine: str) -> Tensor:
    """Route, gather, grouped product, activation, grouped product, weighted sum; a launch or more for each.

    The sort of the routes is part of it. What a backward would need (rows of x, h, the sort) is alive until the end.
    """
    top_k, width = layer.shape.top_k, layer.shape.width
    with torch.no_grad():
        ids, order = layer.topk_idx.flatten().sort(stable=True)
        experts = torch.arange(layer.shape.num_experts, dtype=ids.dtype, device=ids.device)
        ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        x_rows = layer.x.index_select(0, order // top_k)
        h = grouped_mm(x_rows, layer.w_gate_up, ends)
        a = F.silu(h[:, :width]).mul_(h[:, width:])
        o_rows = grouped_mm(a, layer.w_down, ends)
        return COMBINES[combine](o_rows, place, layer.topk_weights)


# -- all implementations -----------------------------------------------------------------------------------------------


def dense(layer: Layer) -> Call:
    """cuBLAS with as many operations: all rows through one expert's weights; no routing, activation or combine."""
    rows = layer.topk_idx.numel()
    x_rows = torch.randn(rows, layer.shape.hidden, device=layer.x.device, dtype=layer.x.dtype)
    a_rows = torch.randn(rows, layer.shape.width, device=layer.x.device, dtype=layer.x.dtype)

    def call() -> Tensor:
        with torch.no_grad():
            torch.mm(x_rows, layer.w_gate_up[0].t())
            return torch.mm(a_rows, layer.w_down[0].t())

    return call


def route(layer: Layer) -> Call:
    """The route kernel alone, which is part of every launch of the layer."""
    return lambda: torch.ops.moe.route(layer.topk_idx, layer.shape.num_experts)[0]


def implementation(layer: Layer, name: str, combine: str) -> Call:
    """The call of that name; `combine` is the staged PyTorch one's."""
    if name == "dense":
        return dense(layer)
    if name == "route":
        return route(layer)
    if name == "torch_staged":
        return lambda: torch_staged(layer, combine)
    return lambda: layer.forward(name)
