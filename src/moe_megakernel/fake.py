"""Fake kernels: shapes, dtypes and devices of every op's results, for `torch.compile` and `torch.export`.

Registered at import by `ops`. They never look at values and never talk to other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .distributed.capacity import traced_row_capacity
from .distributed.group import get_group
from .reference.numerics import compute_dtype
from .reference.route import TOKEN_CLASSES
from .schemas import lib, read_backward, read_forward, unpack_needs


def _route(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    new = topk_idx.new_empty
    return (
        new(topk_idx.numel(), dtype=torch.int32),
        new(num_experts, TOKEN_CLASSES, dtype=torch.int32),
        new(1, dtype=torch.int64),
    )


def _forward(*args: Any) -> tuple[Tensor, ...]:
    inputs, _, group, options = read_forward(args)
    new, routes = inputs.x.new_empty, inputs.topk_idx.numel()
    experts, width, _ = inputs.w_gate_up.shape
    plan = [new(experts + 1, dtype=torch.int32)]
    if group is None:
        rows = routes
        plan += [new(routes, dtype=torch.int32)]
    else:
        state = get_group(group.group_name)
        rows = traced_row_capacity(state, group.row_capacity)
        splits = new(2, state.ranks, dtype=torch.int64, device="cpu")
        plan += [new(rows, dtype=torch.int32), new(routes, dtype=torch.int32), splits]
    return new(inputs.x.shape), new(rows if options.saves_h else 0, width), new(0), *plan


def _backward(args: tuple[Any, ...], grouped: bool) -> tuple[Tensor, ...]:
    saved, _, main_grads, _, options = read_backward(args, grouped)
    needs, dy = unpack_needs(options.needs), saved.dy
    experts, width = saved.expert_offsets.shape[0] - 1, saved.h.shape[1]
    hidden, expert_width = dy.shape[1], width // options.act.width_factor

    def grad(asked: bool, *shape: int, dtype: torch.dtype = dy.dtype) -> Tensor:
        return dy.new_empty(shape if asked else (0,), dtype=dtype if asked else dy.dtype)

    return (
        grad(needs.x, *dy.shape),
        grad(needs.topk_weights, *saved.topk_weights.shape, dtype=compute_dtype(dy.dtype)),
        grad(needs.w_gate_up and main_grads[0] is None, experts, width, hidden),
        grad(needs.w_down and main_grads[1] is None, experts, hidden, expert_width),
        grad(needs.bias_gate_up, experts, width),
        grad(needs.bias_down, experts, hidden),
    )


def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    return _backward(args, grouped=False)


def _group_backward(*args: Any) -> tuple[Tensor, ...]:
    return _backward(args, grouped=True)


for _name, _function in {
    "route": _route,
    "layer_forward": _forward,
    "layer_forward_direct": _forward,
    "group_forward": _forward,
    "layer_backward": _layer_backward,
    "layer_backward_accumulate": _layer_backward,
    "group_backward": _group_backward,
    "group_backward_accumulate": _group_backward,
}.items():
    torch.library.register_fake(f"moe::{_name}", _function, lib=lib)
