"""Argument checks of the op: one clear error before anything runs, `op: argument: expected ..., got ...`.

Only shapes, dtypes, devices and options are looked at, never values, so that the checks cost no synchronisation and
can run in a trace. Expert ids are checked where they are sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activations import Activation
from .distributed.partition import expert_range
from .reference.numerics import compute_dtype
from .schemas import Inputs, InputTensors

OP = "dispatch_gemm_combine"
_VALUES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SCORES = (torch.float32, torch.bfloat16, torch.float16)
_INDICES = (torch.int32, torch.int64)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], x: Tensor | None = None) -> None:
    """`x`: the tensor whose dtype decides what is allowed, for the message."""
    if tensor.dtype not in allowed:
        why = "" if x is None else f" with {_names((x.dtype,))} x"
        raise TypeError(f"{OP}: {name}: expected {_names(allowed)}{why}, got {_names((tensor.dtype,))}")


def _rank(name: str, tensor: Tensor, shape: str) -> None:
    if tensor.dim() != shape[: shape.index("]")].count(",") + 1:
        raise ValueError(f"{OP}: {name}: expected {shape}, got shape {list(tensor.shape)}")


def _shape(name: str, tensor: Tensor, legend: str, expected: tuple[int, ...]) -> None:
    if tensor.shape == expected:
        return
    _rank(name, tensor, legend)
    for got, want in zip(tensor.shape, expected, strict=True):
        if got != want:
            raise ValueError(f"{OP}: {name}: expected {legend} = {list(expected)}, got shape {list(tensor.shape)}")


def check_arguments(
    inputs: Inputs, num_experts: int, rank: int, ranks: int, act: Activation, row_capacity: int
) -> None:
    """Raises TypeError or ValueError for the first argument that does not fit."""
    _check_dtypes(inputs)
    _check_shapes(inputs, num_experts, rank, ranks, act)
    if row_capacity < -1:
        raise ValueError(f"{OP}: row_capacity: expected -1 or at least 0, got {row_capacity}")


def surely_fits(inputs: InputTensors, num_experts: int, act: Activation) -> bool:
    """Whether a call of one rank without main gradients passes `check_arguments`, in as few steps as that takes.

    False means that `check_arguments` must decide. For plain tensors alone: a trace is to see its comparisons only.
    """
    x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, main_grad_gate_up, main_grad_down = inputs
    dtype, device = x.dtype, x.device
    x_shape, routes, down_shape = x.shape, topk_idx.shape, w_down.shape
    if not (len(x_shape) == len(routes) == 2 and len(down_shape) == 3):
        return False
    (tokens, hidden), width = x_shape, down_shape[2]
    h_width = act.width_factor * width
    return (
        w_gate_up.shape == (num_experts, h_width, hidden)
        and down_shape == (num_experts, hidden, width)
        and routes[0] == tokens
        and topk_weights.shape == routes
        and dtype in _VALUES
        and w_gate_up.dtype == w_down.dtype == dtype
        and topk_idx.dtype in _INDICES
        and topk_weights.dtype in _SCORES
        and topk_idx.device == topk_weights.device == w_gate_up.device == w_down.device == device
        and (bias_gate_up is None or _is(bias_gate_up, (num_experts, h_width), dtype, device))
        and (bias_down is None or _is(bias_down, (num_experts, hidden), dtype, device))
        and main_grad_gate_up is None
        and main_grad_down is None
        and 0 not in (num_experts, hidden, width, routes[1])  # sizes, since num_experts is one of w_down's
        and tokens * routes[1] < 2**31
    )


def _is(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return tensor.shape == shape and tensor.dtype == dtype and tensor.device == device


def _check_dtypes(inputs: Inputs) -> None:
    """Raises TypeError for a dtype that is not supported in this mix, ValueError for a tensor on another device."""
    x, topk_weights = inputs.x, inputs.topk_weights
    _dtype("x", x, _VALUES)
    _dtype("topk_idx", inputs.topk_idx, _INDICES)
    _dtype("topk_weights", topk_weights, (*_SCORES, torch.float64) if x.dtype == torch.float64 else _SCORES, x)
    for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            _dtype(name, tensor, (x.dtype,), x)
    for name in ("main_grad_gate_up", "main_grad_down"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            _dtype(name, tensor, (compute_dtype(x.dtype),), x)
            if tensor.requires_grad:
                raise ValueError(f"{OP}: {name}: expected a tensor that does not require grad, got one that does")
    device = x.device
    for name, tensor in zip(Inputs._fields, inputs, strict=True):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{OP}: {name}: expected device {device} (that of x), got {tensor.device}")


def _check_shapes(inputs: Inputs, num_experts: int, rank: int, ranks: int, act: Activation) -> None:
    """Raises ValueError for a shape that does not fit the others, the group or the activation."""
    x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, main_grad_gate_up, main_grad_down = inputs
    if num_experts < 1:
        raise ValueError(f"{OP}: num_experts: expected at least 1, got {num_experts}")
    _rank("x", x, "[T, H]")
    tokens, hidden = x.shape
    if hidden < 1:
        raise ValueError(f"{OP}: x: expected [T, H] with H at least 1, got shape {list(x.shape)}")
    _rank("topk_idx", topk_idx, "[T, K]")
    top_k = topk_idx.shape[1]
    if top_k < 1:
        raise ValueError(f"{OP}: topk_idx: expected [T, K] with K at least 1, got shape {list(topk_idx.shape)}")
    _shape("topk_idx", topk_idx, "[T, K]", (tokens, top_k))
    _shape("topk_weights", topk_weights, "[T, K]", (tokens, top_k))
    experts = len(expert_range(num_experts, rank, ranks))
    _rank("w_down", w_down, "[L, H, I]")
    width = w_down.shape[2]
    if width < 1:
        raise ValueError(f"{OP}: w_down: expected [L, H, I] with I at least 1, got shape {list(w_down.shape)}")
    h_width, h_name = act.width_factor * width, "2I" if act.gated else "I"
    if w_down.shape != (experts, hidden, width) or w_gate_up.shape != (experts, h_width, hidden):
        holds = f" (rank {rank} of {ranks} holds L = {experts} of {num_experts} experts)"
        _shape("w_down", w_down, f"[L, H, I]{holds}", (experts, hidden, width))
        _shape("w_gate_up", w_gate_up, f"[L, {h_name}, H] for {act.name}{holds}", (experts, h_width, hidden))
    if bias_gate_up is not None:
        _shape("bias_gate_up", bias_gate_up, f"[L, {h_name}]", (experts, h_width))
    if bias_down is not None:
        _shape("bias_down", bias_down, "[L, H]", (experts, hidden))
    if main_grad_gate_up is not None:
        _shape("main_grad_gate_up", main_grad_gate_up, f"[L, {h_name}, H]", (experts, h_width, hidden))
    if main_grad_down is not None:
        _shape("main_grad_down", main_grad_down, "[L, H, I]", (experts, hidden, width))
    if tokens * top_k >= 2**31:
        raise ValueError(f"{OP}: topk_idx: expected fewer than 2**31 routes (T * K), got {tokens * top_k}")
