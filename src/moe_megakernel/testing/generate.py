"""Inputs of the layer at O(1) magnitudes, routings of every awkward kind, and the slow oracle they are checked against.

Used by the test suite; shipped so that a bug report can build its case from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import resolve_activation
from ..reference.numerics import compute_dtype

#: Names of `LayerInputs` fields that can have gradients, in the op's order.
DIFFERENTIABLE = ("x", "topk_weights", "w_gate_up", "w_down", "bias_gate_up", "bias_down")


@dataclass(frozen=True)
class LayerInputs:
    """Arguments of one call, see `torch.ops.moe.dispatch_gemm_combine`."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    bias_gate_up: Tensor | None
    bias_down: Tensor | None
    num_experts: int
    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None

    def call(self, **options: object) -> Tensor:
        """Runs the op on these inputs."""
        settings: dict[str, Any] = {"num_experts": self.num_experts, "activation": self.activation, "alpha": self.alpha}
        settings |= {"limit": self.limit, **options}
        tensors = (getattr(self, f.name) for f in fields(self)[:7])
        return torch.ops.moe.dispatch_gemm_combine(*tensors, **settings)

    def leaves(self, **requires_grad: bool) -> LayerInputs:
        """Fresh leaf copies of every tensor; those that can have a gradient ask for one unless told `name=False`."""
        copies: dict[str, Any] = {}
        for name in DIFFERENTIABLE:
            tensor = getattr(self, name)
            if tensor is not None:
                copies[name] = tensor.detach().clone().requires_grad_(requires_grad.get(name, True))
        return replace(self, topk_idx=self.topk_idx.clone(), **copies)

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> LayerInputs:
        """Values in `dtype` and on `device`; routing weights in float32, or float64 with float64."""
        changes: dict[str, Any] = {}
        for name in DIFFERENTIABLE:
            tensor = getattr(self, name)
            if tensor is not None:
                wanted = compute_dtype(dtype) if name == "topk_weights" else dtype
                changes[name] = tensor.detach().to(device=device, dtype=wanted)
        return replace(self, topk_idx=self.topk_idx.to(device=device), **changes)

    def grads(self) -> dict[str, Tensor | None]:
        """Name to gradient of every differentiable tensor that is there."""
        return {n: getattr(self, n).grad for n in DIFFERENTIABLE if getattr(self, n) is not None}


def make_inputs(
    topk_idx: Tensor,
    hidden: int = 64,
    expert_width: int = 32,
    num_experts: int = 4,
    *,
    local_experts: int | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> LayerInputs:
    """Random inputs for a routing: x, weights and outputs of order 1, routing weights of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, top_k = topk_idx.shape
    experts = num_experts if local_experts is None else local_experts
    act = resolve_activation(activation, alpha, limit)
    width = act.width_factor * expert_width
    inputs = LayerInputs(
        x=normal(tokens, hidden),
        topk_idx=topk_idx,
        topk_weights=normal(tokens, top_k),
        w_gate_up=normal(experts, width, hidden) / hidden**0.5,
        w_down=normal(experts, hidden, expert_width) / expert_width**0.5,
        bias_gate_up=normal(experts, width) if bias else None,
        bias_down=normal(experts, hidden) if bias else None,
        num_experts=num_experts,
        activation=activation,
        alpha=alpha,
        limit=limit,
    )
    return inputs.to(dtype)


def random_routing(
    tokens: int, num_experts: int, top_k: int, *, zipf: float = 0.0, drop: float = 0.0, seed: int = 0
) -> Tensor:
    """int64 [T, K]; no repeats inside a token unless K > E, popularity by Zipf(`zipf`), a share `drop` of -1."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, num_experts + 1, dtype=torch.float64).pow(-zipf)
    uniform = torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64)
    gumbel = popularity.log() - (-uniform.clamp(1e-12, 1 - 1e-12).log()).log()
    order = gumbel.argsort(dim=1, descending=True, stable=True)
    idx = order.repeat(1, -(-top_k // num_experts))[:, :top_k].contiguous()
    dropped = torch.rand(tokens, top_k, generator=generator) < drop
    return torch.where(dropped, -1, idx)


def oracle(inputs: LayerInputs) -> Tensor:
    """y by a loop over tokens and routes, in the inputs' dtype, differentiable by autograd. For float64 inputs."""
    tokens = []
    for t, ids in enumerate(inputs.topk_idx.tolist()):
        total = torch.zeros_like(inputs.x[t])
        for k, e in enumerate(ids):
            if e < 0:
                continue
            h = inputs.x[t : t + 1] @ inputs.w_gate_up[e].t()
            h = h if inputs.bias_gate_up is None else h + inputs.bias_gate_up[e]
            o = plain_activation(h, inputs) @ inputs.w_down[e].t()
            o = o if inputs.bias_down is None else o + inputs.bias_down[e]
            total = total + inputs.topk_weights[t, k] * o[0]
        tokens.append(total)
    return torch.stack(tokens) if tokens else inputs.x * 0


def plain_activation(h: Tensor, inputs: LayerInputs) -> Tensor:
    """The activation of h, written with `torch.nn.functional` and apart from the library's own formulas."""
    if inputs.activation == "relu2":
        return F.relu(h) ** 2
    gate, up = h.chunk(2, dim=-1)
    if inputs.activation.startswith("geglu"):
        return F.gelu(gate, approximate="tanh" if inputs.activation == "geglu_tanh" else "none") * up
    act = resolve_activation(inputs.activation, inputs.alpha, inputs.limit)
    gate, up = torch.clamp(gate, max=act.limit), torch.clamp(up, min=-act.limit, max=act.limit)
    if inputs.activation == "swiglu":
        return F.silu(gate) * up
    return gate * torch.sigmoid(act.alpha * gate) * (up + 1)
