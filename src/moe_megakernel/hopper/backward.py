"""The backward of a rank, alone or in a group, in the fused kernels: `mega` (one launch) or `staged` (one a stage).

The mirror of `forward`. Called by `inner_ops` and `rows` for steps whose forward ran there. Allocates the gradients
that are asked for, brings tensors into the kernels' layout, and calls `moe::hopper_backward`, which returns at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..plan_names import Direction
from ..schemas import given_main_grad
from .device_status import poll, status_record
from .launch import PeerCall, hooks_for, num_sms_for, on_its_device, timeout_ns
from .layout import aligned_bias, aligned_main_grad, aligned_rows, aligned_weight, separate_rows
from .ops import ACTIVATION_NUMBERS
from .workspaces import get_workspace

_launch = torch.ops.moe.hopper_backward.default

#: dx, dtopk_weights, dw_gate_up, dw_down, dbias_gate_up, dbias_down; an empty tensor for one that is not returned.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@lru_cache(maxsize=1024)
def workspace_bytes(
    tokens: int, top_k: int, num_experts: int, hidden: int, width: int, gated: bool, staged: bool, num_sms: int
) -> int:
    """Bytes of the kernels' workspace for one call; see `moe::hopper_backward_workspace_bytes`."""
    return torch.ops.moe.hopper_backward_workspace_bytes(
        tokens, top_k, num_experts, hidden, width, gated, staged, num_sms
    )


@on_its_device
def layer_backward(
    dy: Tensor,
    x: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor | None,
    w_down: Tensor | None,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    h: Tensor,
    anchor: Tensor,
    expert_offsets: Tensor,
    row_route: Tensor,
    main_grad_gate_up: Tensor | None,
    main_grad_down: Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    backend: str,
    needs: int,
    recompute: bool,
    peer: PeerCall | None = None,
    group_experts: int = 0,
) -> Gradients:
    """One rank's backward on a CUDA device.

    Args: those of `moe::layer_backward_accumulate`, as it gets them; main gradients are None, or empty, where the
    gradient is returned.
        dy: bfloat16 [T, H], any strides. topk_weights: float32 [T, K].
        h, expert_offsets, row_route: as `hopper.forward.layer_forward` returned them; h is not read with `recompute`.
        backend: "mega" or "staged".
        peer, group_experts: the group that the rank is one of and E of all of it, as in `hopper.forward`.

    Returns:
        Contiguous gradients; NaN if the step was refused. Weight gradients with a main gradient are added to it.

    Raises:
        RuntimeError: the launch failed. An error of an earlier step is left to the next forward, and so is what fails
            on the device now: autograd is no place to hear of another step's error.
    """
    device, (tokens, top_k), hidden = dy.device, topk_idx.shape, dy.shape[1]
    num_experts, columns, gated = expert_offsets.shape[0] - 1, h.shape[1], activation != "relu2"
    width = columns // 2 if gated else columns
    main_gate_up = None if main_grad_gate_up is None or not needs & 4 else given_main_grad(main_grad_gate_up)
    main_down = None if main_grad_down is None or not needs & 8 else given_main_grad(main_grad_down)
    new = dy.new_empty
    dx = new(tokens, hidden) if needs & 1 else None
    dtopk_weights = topk_weights.new_empty(tokens, top_k) if needs & 2 else None
    dw_gate_up = new(num_experts, columns, hidden) if needs & 4 and main_gate_up is None else None
    dw_down = new(num_experts, hidden, width) if needs & 8 and main_down is None else None
    dbias_gate_up = new(num_experts, columns) if needs & 16 else None
    dbias_down = new(num_experts, hidden) if needs & 32 else None
    grads = (dx, dtopk_weights, dw_gate_up, dw_down, dbias_gate_up, dbias_down)
    if tokens == 0 and peer is None:
        for grad in grads:
            if grad is not None:
                grad.zero_()
    elif needs:
        rows = aligned_rows if peer is None else separate_rows
        poll(device)  # a timeout since the last forward has left a workspace that no launch may use
        staged, num_sms = backend == "staged", num_sms_for(device.index)
        experts = num_experts if peer is None else group_experts
        sizes = (tokens, top_k, experts, hidden, width, gated, staged, num_sms)
        log, skip_counter, skip_index = hooks_for(Direction.BACKWARD, sizes, device, peer)
        sum_gate_up = None if main_gate_up is None else aligned_main_grad(main_gate_up)
        sum_down = None if main_down is None else aligned_main_grad(main_down)
        _launch(
            rows(dy),
            None if x is None else rows(x),
            topk_idx,
            topk_weights if peer is None else topk_weights.contiguous(),
            None if w_gate_up is None else aligned_weight(w_gate_up),
            None if w_down is None else aligned_weight(w_down),
            aligned_bias(bias_gate_up),
            aligned_bias(bias_down),
            None if recompute else aligned_rows(h),
            expert_offsets,
            row_route,
            dx,
            dtopk_weights,
            dw_gate_up if main_gate_up is None else sum_gate_up,
            dw_down if main_down is None else sum_down,
            dbias_gate_up,
            dbias_down,
            get_workspace(device, workspace_bytes(*sizes)) if peer is None else peer.workspace,
            status_record(device).tensor if peer is None else peer.status,
            log,
            None if peer is None else peer.group,
            experts,
            width,
            ACTIVATION_NUMBERS[activation],
            alpha,
            limit,
            staged,
            num_sms,
            timeout_ns(),
            skip_counter,
            skip_index,
        )
        _settle(main_gate_up, sum_gate_up)
        _settle(main_down, sum_down)
    return tuple(new(0) if grad is None else grad for grad in grads)  # type: ignore[return-value]


def _settle(main_grad: Tensor | None, summed: Tensor | None) -> None:
    """Brings home what was added to a copy of a main gradient, and lets autograd know that the gradient has changed."""
    if main_grad is None or summed is None:
        return
    if summed is main_grad:
        torch.autograd.graph.increment_version(main_grad)
    else:
        main_grad.copy_(summed)
