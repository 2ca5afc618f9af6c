"""The forward of a rank, alone or in a group, in the fused kernels: `mega` (one launch) or `staged` (one a stage).

Called by `inner_ops` for calls that `support` lets through, and by `rows` for what several ranks have exchanged.
Allocates the outputs, brings tensors into the kernels' layout, and calls `moe::hopper_forward`, which returns at once:
no step waits for the device. `backward` is its mirror.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .. import contexts
from ..plan_names import Direction
from .device_status import has_group_records, status_record
from .launch import NO_HOOKS, PeerCall, hooks_for, num_sms_for, on_its_device, timeout_ns
from .layout import aligned_bias, aligned_rows, aligned_weight, separate_rows
from .ops import ACTIVATION_NUMBERS
from .workspaces import capturing, current_stream, get_workspace

_launch = torch.ops.moe.hopper_forward.default


@lru_cache(maxsize=1024)
def workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, width: int, gated: bool, staged: bool, num_sms: int
) -> int:
    """Bytes of the kernels' workspace for one call; see `moe::hopper_workspace_bytes`."""
    return torch.ops.moe.hopper_workspace_bytes(tokens, top_k, num_experts, hidden, width, gated, staged, num_sms)


@on_its_device
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
    h: Tensor | None = None,
    peer: PeerCall | None = None,
    since: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One rank's forward on a CUDA device.

    Args: those of `moe::layer_forward`, as it gets them, since names for groups of them cost time.
        x, weights, biases: bfloat16, H and I multiples of 8; topk_weights: float32. Any strides.
        backend: "mega" or "staged".
        h: bfloat16 [T * K, 2I], contiguous, or [0, 2I]: where the caller wants h; None for a new tensor if backward
            needs one.
        peer: the group that the rank is one of, then num_experts counts the whole group's and the rows are its
            row_capacity; None for one rank.
        since: `contexts.generation()` before errors of earlier steps were looked for: then later calls may go without
            Python. None keeps no context.

    Returns:
        y [T, H]; h [T * K, 2I] whose rows past the last are undefined, or [0, 2I]; expert_offsets int32 [E + 1], all -1
        if the step was refused; row_route int32 [T * K], as `reference.layer.layer_forward`. With `peer` h and
        row_route have row_capacity rows, expert_offsets those of the rank's experts, and a row's home rank stands in
        the upper bits of row_route.

    Raises:
        RuntimeError: the launch failed. What fails on the device is raised by a later call (`device_status`).
    """
    device = x.device
    (tokens, top_k), (_, columns, hidden), width = topk_idx.shape, w_gate_up.shape, w_down.shape[2]
    routes = tokens * top_k if peer is None else peer.row_capacity
    y = x.new_empty(tokens, hidden)
    if h is None:
        h = x.new_empty(routes if needs and not recompute else 0, columns)
    row_route = topk_idx.new_empty(routes, dtype=torch.int32)
    if tokens == 0 and peer is None:
        return y, h, topk_idx.new_zeros(num_experts + 1, dtype=torch.int32), row_route
    expert_offsets = topk_idx.new_empty(w_gate_up.shape[0] + 1, dtype=torch.int32)
    staged, num_sms = backend == "staged", num_sms_for(device.index)
    sizes = (tokens, top_k, num_experts, hidden, width, columns != width, staged, num_sms)
    log, skip_counter, skip_index = hooks = hooks_for(Direction.FORWARD, sizes, device, peer)
    workspace = get_workspace(device, workspace_bytes(*sizes)) if peer is None else peer.workspace
    status = status_record(device).tensor if peer is None else peer.status
    timeout = timeout_ns()
    _launch(
        aligned_rows(x) if peer is None else separate_rows(x),
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
        workspace,
        status,
        log,
        None if peer is None else peer.group,
        num_experts,
        ACTIVATION_NUMBERS[activation],
        alpha,
        limit,
        staged,
        num_sms,
        timeout,
        skip_counter,
        skip_index,
    )
    if since is not None and hooks is NO_HOOKS and x.is_cuda and not has_group_records() and not capturing():
        contexts.keep(since, workspace, status, current_stream(device.index), num_sms, timeout)
    return y, h, expert_offsets, row_route
