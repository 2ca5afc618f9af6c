"""The whole layer on one rank: route, dispatch, experts, combine, and the backward of all four.

Implements the inner ops `moe::layer_forward` and `moe::layer_backward` for the reference backend. With several ranks
`distributed.layer` puts the exchange between the same stages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import Activation
from ..errors import RoutingError, defer, invalid_id
from .combine import combine, scatter_rows
from .dispatch import gather_rows, gather_weights
from .experts import Needs, RowGrads, Weights, experts_backward, experts_forward


def routing_error(op: str, topk_idx: Tensor, first_bad: int, num_experts: int, rank: int | None = None) -> RoutingError:
    """The error for an invalid expert id at flat position `first_bad` of topk_idx."""
    top_k = topk_idx.shape[1]
    token, k = divmod(first_bad, top_k)
    return invalid_id(op, first_bad, int(topk_idx[token, k]), top_k, num_experts, rank)


def refuse(device: torch.device, error: Exception) -> None:
    """Raises on CPU. On CUDA leaves the error for the next call, and the caller returns NaN."""
    if device.type == "cpu":
        raise error
    defer(device, error)  # type: ignore[arg-type]


def offsets_from_counts(class_counts: Tensor) -> Tensor:
    """Row offsets int32 [L + 1] of the experts from class_counts [L, 64]."""
    offsets = torch.zeros(class_counts.shape[0] + 1, dtype=torch.int32, device=class_counts.device)
    offsets[1:] = class_counts.sum(1).cumsum(0)
    return offsets


def new_h(x: Tensor, rows: int, used: int, width: int) -> Tensor:
    """The buffer for h, [rows, width]; rows past the `used` ones are zero, the others not yet written."""
    h = x.new_empty(rows, width)
    h[used:].zero_()
    return h


def layer_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, weights: Weights, num_experts: int, act: Activation, save_h: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One rank's forward.

    Args:
        x: [T, H].
        topk_idx: int32 or int64 [T, K].
        topk_weights: [T, K] in the compute dtype.
        weights: all E experts' parameters.
        num_experts: E.
        act: the activation.
        save_h: whether h is returned; else it is [0, 2I].

    Returns:
        y [T, H]; h [T * K, 2I]; expert_offsets int32 [E + 1], all -1 if the step was refused; row_route int32 [T * K],
        the route id of each row, -1 past the last.

    Raises:
        RoutingError: an invalid expert id (on CPU; on CUDA it is deferred and y is NaN).
    """
    assert weights.gate_up is not None
    top_k, width = topk_idx.shape[1], weights.gate_up.shape[1]
    num_routes = topk_idx.numel()
    row_route, class_counts, first_bad = torch.ops.moe.route(topk_idx, num_experts)
    bad = int(first_bad)
    if bad >= 0:
        refuse(x.device, routing_error("dispatch_gemm_combine", topk_idx, bad, num_experts))
        h = new_h(x, num_routes if save_h else 0, 0, width)
        return (
            torch.full_like(x, torch.nan, memory_format=torch.contiguous_format),
            h,
            _refused(num_experts, x),
            row_route,
        )
    expert_offsets = offsets_from_counts(class_counts)
    offsets = expert_offsets.tolist()
    routes = row_route[: offsets[-1]]
    h = new_h(x, num_routes if save_h else 0, offsets[-1], width)
    x_rows = gather_rows(x, routes, top_k)
    o_rows = experts_forward(x_rows, offsets, weights, act, h if save_h else None)
    o = scatter_rows(o_rows, routes, num_routes).view(*topk_idx.shape, x.shape[1])
    return combine(o, topk_weights, topk_idx, x.dtype), h, expert_offsets, row_route


def layer_backward(
    dy: Tensor,
    x: Tensor | None,
    topk_weights: Tensor,
    weights: Weights,
    h: Tensor,
    expert_offsets: Tensor,
    row_route: Tensor,
    act: Activation,
    needs: Needs,
    recompute: bool,
    accumulate: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None, RowGrads]:
    """One rank's backward.

    Args:
        dy: [T, H], any strides.
        x: [T, H]; needed for dW_gate_up or with recompute.
        topk_weights: [T, K] in the compute dtype.
        weights: parameters; those that nothing reads may be None.
        h, expert_offsets, row_route: as `layer_forward` returned them.
        act: the activation.
        needs: which gradients to compute.
        recompute: h was not saved.
        accumulate: see `experts_backward`.

    Returns:
        dx [T, H] and dtopk_weights [T, K] (or None), and the gradients of the parameters. NaN if the step was refused.
    """
    (tokens, top_k), num_routes = topk_weights.shape, topk_weights.numel()
    offsets = expert_offsets.tolist()
    refused = offsets[0] < 0
    if refused:
        offsets = [0] * len(offsets)
    routes = row_route[: offsets[-1]]
    grads = experts_backward(
        gather_rows(dy, routes, top_k),
        gather_weights(topk_weights, routes),
        None if x is None else gather_rows(x, routes, top_k),
        None if recompute else h,
        offsets,
        weights,
        act,
        needs,
        accumulate,
    )
    dx = dtopk_weights = None
    if grads.dx_rows is not None:
        dx = combine(
            scatter_rows(grads.dx_rows, routes, num_routes).view(tokens, top_k, dy.shape[1]), None, None, dy.dtype
        )
    if grads.ds_rows is not None:
        dtopk_weights = scatter_rows(grads.ds_rows, routes, num_routes).view(tokens, top_k)
    if refused:
        fill_nan(dx, dtopk_weights, grads, accumulate)
    return dx, dtopk_weights, grads


def fill_nan(
    dx: Tensor | None, dtopk_weights: Tensor | None, grads: RowGrads, accumulate: tuple[Tensor | None, Tensor | None]
) -> None:
    """Makes every gradient of a refused step NaN."""
    parameters = (grads.dw_gate_up, grads.dw_down, grads.dbias_gate_up, grads.dbias_down)
    for tensor in (dx, dtopk_weights, *parameters, *accumulate):
        if tensor is not None:
            tensor.fill_(torch.nan)


def _refused(num_experts: int, like: Tensor) -> Tensor:
    return torch.full((num_experts + 1,), -1, dtype=torch.int32, device=like.device)
