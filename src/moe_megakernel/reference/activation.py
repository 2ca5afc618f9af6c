"""The activation between the two GEMMs and its derivative, in the compute dtype.

Reads the rounded h, in training, inference and recomputation alike. Called by the gate_up stage (forward) and by the
down stage's backward. Formulas: SwiGLU and GeGLU from Shazeer 2020 (arXiv:2002.05202), relu2 from So et al. 2021
(arXiv:2109.08668), swiglu_oai from the GPT-OSS model card's reference code (clamp, sigmoid(alpha g), up + 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..activations import Activation


def _gate_and_up(h: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    gate, up = h.chunk(2, dim=1)
    if math.isinf(act.limit):
        return gate, up
    return gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)


def activate(h: Tensor, act: Activation) -> Tensor:
    """act(h): h [n, 2I] (gate, up) or [n, I] -> [n, I], unrounded, in h's dtype (float32 or float64)."""
    if act.name == "relu2":
        return torch.relu(h).square()
    gate, up = _gate_and_up(h, act)
    if act.name == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if act.name == "swiglu_oai":
        return gate * torch.sigmoid(act.alpha * gate) * (up + 1)
    return torch.nn.functional.gelu(gate, approximate=_gelu_form(act)) * up


def activate_backward(grad: Tensor, h: Tensor, act: Activation) -> Tensor:
    """Gradient of `activate` with respect to h.

    Args:
        grad: gradient of the activation's output, [n, I].
        h: the input of the forward activation, [n, 2I] or [n, I].

    Returns:
        [n, 2I] (gate, up) or [n, I], unrounded. Where a limit clamped a value its gradient is 0.
    """
    if act.name == "relu2":
        return grad * 2 * torch.relu(h)
    gate, up = _gate_and_up(h, act)
    if act.name in ("swiglu", "swiglu_oai"):
        sigmoid = torch.sigmoid(act.alpha * gate)
        value = gate * sigmoid
        slope = sigmoid * (1 + act.alpha * gate * (1 - sigmoid))
        grad_gate = grad * (up + 1 if act.name == "swiglu_oai" else up) * slope
    else:
        value = torch.nn.functional.gelu(gate, approximate=_gelu_form(act))
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=_gelu_form(act))
    grad_up = grad * value
    if not math.isinf(act.limit):
        raw_gate, raw_up = h.chunk(2, dim=1)
        grad_gate = torch.where(raw_gate > act.limit, 0.0, grad_gate)
        grad_up = torch.where(raw_up.abs() > act.limit, 0.0, grad_up)
    return torch.cat((grad_gate, grad_up), dim=1)


def _gelu_form(act: Activation) -> str:
    return "tanh" if act.name == "geglu_tanh" else "none"
