"""The forward of one rank in the fused kernels: the backends `mega` (one launch) and `staged` (one launch a stage).

Called by `inner_ops` for calls that `support` lets through. Allocates the outputs, brings tensors into the kernels'
layout, and calls `moe::hopper_forward`, which returns at once: no step waits for the device. Every figure that does not
change from call to call is kept, because a small layer takes no longer than this function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import get_num_sms, get_timeout
from .device_status import status_record
from .layout import aligned_bias, aligned_rows, aligned_weight
from .ops import ACTIVATION_NUMBERS
from .workspaces import get_workspace

_launch = torch.ops.moe.hopper_forward.default


class LaunchSizes(NamedTuple):
    """What a launch's memory depends on: T, K, E, H, I, rows of w_gate_up (2I or I), backend, SMs."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    width: int
    gated: bool
    staged: bool
    num_sms: int


class LaunchHooks(NamedTuple):
    """The last arguments of `hopper.ops` that only tests fill in."""

    log: Tensor | None = None
    skip_counter: int = -1
    skip_index: int = 0


_NO_HOOKS = LaunchHooks()
#: Asked for the hooks of every launch on a device, or None; set by `hopper.testing`.
find_hooks: Callable[[LaunchSizes, torch.device], LaunchHooks] | None = None


@lru_cache(maxsize=1024)
def workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, width: int, gated: bool, staged: bool, num_sms: int
) -> int:
    """Bytes of the kernels' workspace for one call; see `moe::hopper_workspace_bytes`."""
    return torch.ops.moe.hopper_workspace_bytes(tokens, top_k, num_experts, hidden, width, gated, staged, num_sms)


@cache
def device_sms(index: int) -> int:
    """SMs of a CUDA device, rounded down to pairs."""
    return torch.cuda.get_device_properties(index).multi_processor_count // 2 * 2


def num_sms_for(index: int) -> int:
    """SMs that a launch on the device takes at most: those of `set_num_sms`, as far as there are so many."""
    asked, available = get_num_sms(), device_sms(index)
    return available if asked is None else min(asked, available)


def layer_forward(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    main_grad_gate_up: Tensor | None,
    main_grad_down: Tensor | None,
    num_experts: int,
    activation: str,
    alpha: float,
    limit: float,
    backend: str,
    needs: int,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One rank's forward on a CUDA device.

    Args: those of `moe::layer_forward`, as it gets them, since names for groups of them cost time.
        x, weights, biases: bfloat16, H and I multiples of 8; topk_weights: float32. Any strides.
        backend: "mega" or "staged".

    Returns:
        y [T, H]; h [T * K, 2I] whose rows past the last are undefined, or [0, 2I]; expert_offsets int32 [E + 1], all -1
        if the step was refused; row_route int32 [T * K], as `reference.layer.layer_forward`.

    Raises:
        RuntimeError: the launch failed. What fails on the device is raised by a later call (`device_status`).
    """
    device = x.device
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return layer_forward(
                x,
                topk_idx,
                topk_weights,
                w_gate_up,
                w_down,
                bias_gate_up,
                bias_down,
                main_grad_gate_up,
                main_grad_down,
                num_experts,
                activation,
                alpha,
                limit,
                backend,
                needs,
                recompute,
            )
    (tokens, top_k), (_, columns, hidden), width = topk_idx.shape, w_gate_up.shape, w_down.shape[2]
    routes = tokens * top_k
    y = x.new_empty(tokens, hidden)
    h = x.new_empty(routes if needs and not recompute else 0, columns)
    row_route = topk_idx.new_empty(routes, dtype=torch.int32)
    if tokens == 0:
        return y, h, topk_idx.new_zeros(num_experts + 1, dtype=torch.int32), row_route
    expert_offsets = topk_idx.new_empty(num_experts + 1, dtype=torch.int32)
    staged, num_sms = backend == "staged", num_sms_for(index)
    sizes = (tokens, top_k, num_experts, hidden, width, columns != width, staged, num_sms)
    find = find_hooks  # once: another thread may take it away
    log, skip_counter, skip_index = _NO_HOOKS if find is None else find(LaunchSizes(*sizes), device)
    _launch(
        aligned_rows(x),
        topk_idx,
        topk_weights,
        aligned_weight(w_gate_up),
        aligned_weight(w_down),
        aligned_bias(bias_gate_up),
        aligned_bias(bias_down),
        y,
        h,
        expert_offsets,
        row_route,
        get_workspace(device, workspace_bytes(*sizes)),
        status_record(device).tensor,
        log,
        num_experts,
        ACTIVATION_NUMBERS[activation],
        alpha,
        limit,
        staged,
        num_sms,
        int(get_timeout() * 1e9),
        skip_counter,
        skip_index,
    )
    return y, h, expert_offsets, row_route
