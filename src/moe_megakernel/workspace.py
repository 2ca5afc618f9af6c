"""Bytes of every buffer that one call of the layer needs, saved or transient, without running anything.

For users who plan memory; the formulas follow the allocations of the reference backend and the collective transport,
and the figures of the fused kernels come from them, those of a group that shares memory (the transport `peer`) too.
"""

from __future__ import annotations

import torch

from . import _native
from .activations import resolve_activation
from .distributed.capacity import default_row_capacity
from .distributed.partition import expert_range
from .hopper.backward import workspace_bytes as backward_kernel_bytes
from .hopper.forward import workspace_bytes as forward_kernel_bytes
from .hopper.peer import group_bytes
from .hopper.support import kernel_fault
from .reference.numerics import compute_dtype, rows_dtype
from .reference.route import TOKEN_CLASSES


def workspace_bytes(
    tokens: int,
    hidden: int,
    expert_width: int,
    num_experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    rank: int = 0,
    row_capacity: int = -1,
    activation: str = "swiglu",
    recompute: bool = False,
    training: bool = True,
    backend: str = "reference",
    transport: str = "collective",
    num_sms: int = 132,
) -> dict[str, int]:
    """Bytes per buffer of one forward and backward call on one rank, at full capacity.

    Args:
        tokens: T, the largest of all ranks.
        hidden, expert_width, num_experts, top_k: H, I, E (of the whole group), K.
        dtype: of x and the weights.
        ranks, rank: W and this rank.
        row_capacity: rows this rank can receive; -1 for the default 2 * T * K. Without effect with one rank, where it
            is T * K.
        activation: as in the op.
        recompute: h is computed again in backward instead of being saved.
        training: False for a forward without gradients.
        backend: "reference", or "mega" or "staged": then "forward.workspace" and "backward.workspace" stand for what
            the kernels need besides their results. Both lie in the same memory, as large as the larger of them, which
            is kept between calls, once for each stream (`release_workspaces`). With several ranks and the transport
            "collective" the kernels run the experts only, and the buffers of the exchange come on top.
        transport: "collective", or "peer" with the kernels; without effect with one rank. With "peer" there is nothing
            but "group.shared", what the rank allocates for all to map, and "group.workspace", beside what is saved:
            both are there once for all layers and streams of a group, as large as its largest call needs, until
            `rebuild` (`release_workspaces` leaves them alone). The figures take `tokens` and `row_capacity` for what
            the group has agreed on.
        num_sms: SMs that the kernels may take, see `set_num_sms`; without effect on the reference. With "peer" all SMs
            of the GPU count, whatever `set_num_sms` says.

    Returns:
        Buffer name to bytes. "saved.*" live from forward to backward (inputs that autograd keeps as well, x and the
        weights, are the caller's and not listed), "forward.*" and "backward.*" only inside the call, "group.*" as long
        as the group is used; backward.* assumes all gradients.

    Raises:
        ValueError: a figure out of range, or kernels that are not in this build or cannot run such a call.
    """
    limits = {"tokens": (tokens, 0), "hidden": (hidden, 1), "expert_width": (expert_width, 1), "top_k": (top_k, 1)}
    for name, (value, least) in limits.items():
        if value < least:
            raise ValueError(f"workspace_bytes: {name}: expected at least {least}, got {value}")
    if row_capacity < -1:
        raise ValueError(f"workspace_bytes: row_capacity: expected -1 or at least 0, got {row_capacity}")
    if transport not in ("peer", "collective"):
        raise ValueError(f"workspace_bytes: transport: expected one of peer, collective, got {transport!r}")
    experts = len(expert_range(num_experts, rank, ranks))
    shares = ranks > 1 and transport == "peer"
    if shares and backend == "reference":
        raise ValueError("workspace_bytes: transport: expected 'collective' with backend 'reference', got 'peer'")
    act = resolve_activation(activation)
    routes, width = tokens * top_k, act.width_factor * expert_width
    rows = routes if ranks == 1 else (default_row_capacity(tokens, top_k) if row_capacity < 0 else row_capacity)
    item, compute, row_item = dtype.itemsize, compute_dtype(dtype).itemsize, rows_dtype(dtype).itemsize
    sizes: dict[str, int] = {}
    if training:
        sizes["saved.h"] = 0 if recompute else rows * width * item
        sizes["saved.expert_offsets"] = 4 * (experts + 1)
        if ranks == 1:
            sizes["saved.row_route"] = 4 * routes
        else:
            sizes["saved.row_route" if shares else "saved.row_order"] = 4 * rows
            sizes["saved.route_order"] = 4 * routes
            sizes["saved.splits"] = 8 * 2 * ranks
    if backend != "reference":
        _check_kernels(backend, dtype, hidden, expert_width, num_experts)
        if shares:
            call = (tokens, top_k, num_experts, hidden, expert_width, act.gated, backend == "staged", num_sms)
            sizes["group.shared"], sizes["group.workspace"] = group_bytes(*call, ranks, rows)
            return sizes
        # With several ranks the experts run as a layer of one route a token (`hopper.rows`), if there are any.
        layer = (tokens, top_k, num_experts) if ranks == 1 else (rows, 1, experts)
        figures = (*layer, hidden, expert_width, act.gated, backend == "staged", num_sms)
        launched = ranks == 1 or rows * experts > 0
        sizes["forward.workspace"] = forward_kernel_bytes(*figures) if launched else 0
        if training:
            sizes["backward.workspace"] = backward_kernel_bytes(*figures) if launched else 0
        if ranks == 1:
            return sizes
        sizes["forward.row_tables"] = 4 * 3 * rows  # expert, weight and route of each row
    else:
        sizes["forward.expert"] = rows * (width + expert_width) * (item + compute) + rows * hidden * compute
        if training:
            sizes["backward.expert"] = rows * (2 * width + 4 * expert_width) * compute
    sizes["forward.class_counts"] = 4 * num_experts * TOKEN_CLASSES * (1 if ranks == 1 else ranks + 1)
    sizes["forward.x_rows"] = rows * hidden * item
    sizes["forward.o_rows"] = rows * hidden * row_item
    sizes["forward.o_routes"] = routes * hidden * row_item
    sizes["forward.y_sum"] = tokens * hidden * compute
    if ranks > 1:
        sizes["forward.x_sent"] = routes * hidden * item
        sizes["forward.o_arrived"] = routes * hidden * row_item
    if training:
        sizes["backward.x_rows"] = rows * hidden * item
        sizes["backward.dy_rows"] = rows * hidden * item
        sizes["backward.dx_rows"] = rows * hidden * row_item
        sizes["backward.dx_routes"] = routes * hidden * row_item
        sizes["backward.ds_rows"] = rows * compute
    return sizes


def _check_kernels(backend: str, dtype: torch.dtype, hidden: int, width: int, num_experts: int) -> None:
    """Raises ValueError where the kernels' figure cannot be had."""
    if backend not in ("mega", "staged"):
        raise ValueError(f"workspace_bytes: backend: expected one of mega, staged, reference, got {backend!r}")
    fault = kernel_fault(dtype, hidden, width, num_experts)
    if fault:
        raise ValueError(f"workspace_bytes: {fault} (with backend {backend!r})")
    if not _native.load_cuda():
        reason = _native.why_cuda_missing()
        raise ValueError(f"workspace_bytes: backend: expected one in this build, got {backend!r}: {reason}")
