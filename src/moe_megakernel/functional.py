"""The friendly call of the layer: any leading dimensions, process groups as objects, defaults filled in.

Sits between `module.MoE` (or a user's own layer) and `torch.ops.moe.dispatch_gemm_combine`; owns no numerics. Group
arguments of the whole package are turned into names here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group = ProcessGroup | DeviceMesh | str | None


def group_name_of(group: Group) -> str:
    """The name under which ops find `group`: "" for None (one rank), a name as it is, else the group's own.

    Raises:
        ValueError: a DeviceMesh of more than one dimension.
        TypeError: anything else.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    name = getattr(group, "group_name", None)
    if isinstance(name, str):
        return name
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(f"moe_layer: group: expected a DeviceMesh of one dimension, got {group.ndim} dimensions")
        return group.get_group().group_name
    raise TypeError(
        f"moe_layer: group: expected None, a ProcessGroup, its name or a DeviceMesh, got {type(group).__name__}"
    )


def _flat(name: str, tensor: Tensor, leading: torch.Size) -> Tensor:
    if tensor.dim() < 1 or tensor.shape[:-1] != leading:
        raise ValueError(
            f"moe_layer: {name}: expected the leading shape of x {tuple(leading)} and one more dimension, "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.dim() == 2:
        return tensor
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def moe_layer(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    *,
    num_experts: int | None = None,
    group: Group = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    backend: str = "auto",
    transport: str = "auto",
    row_capacity: int = -1,
    recompute: bool = False,
    main_grad_gate_up: Tensor | None = None,
    main_grad_down: Tensor | None = None,
) -> Tensor:
    """Sends each token through its experts and returns the weighted sum of their outputs.

    This is `torch.ops.moe.dispatch_gemm_combine` with leading dimensions and a group object; dtypes, gradients, errors
    and the meaning of every option are the op's.

    Args:
        x: [..., H] tokens of this rank; the leading dimensions may hold no tokens at all.
        topk_idx: [..., K] int32 or int64, expert ids in [0, num_experts); -1 drops the route.
        topk_weights: [..., K] any finite values, fp32 preferred.
        w_gate_up: [L, 2I, H] of this rank's experts: rows 0..I-1 gate, I..2I-1 up; [L, I, H] for relu2.
        w_down: [L, H, I].
        bias_gate_up: [L, 2I] ([L, I] for relu2) or None.
        bias_down: [L, H] or None.
        num_experts: experts in the whole group. May be left out without a group, where it is L.
        group: None (this process holds every expert), a ProcessGroup, its name, or a DeviceMesh of one dimension.
        activation, alpha, limit: see `moe_megakernel.activations.resolve_activation`.
        backend, transport: names, or "auto": the kernels where they can run the call, and memory that the ranks share
            where they can share it. See `moe_megakernel.backends`; the same on every rank.
        row_capacity: rows that this rank can receive; -1 is the default of the last `reserve`.
        recompute: keep less for backward and compute it again there.
        main_grad_gate_up, main_grad_down: fp32 buffers that take the weight's gradient in place of `.grad`.

    Returns:
        y, shaped like x.

    Raises:
        ValueError: leading shapes that differ, or num_experts left out with a group; else as the op.
    """
    if x.dim() < 1:
        raise ValueError(f"moe_layer: x: expected at least one dimension, got shape {tuple(x.shape)}")
    group_name = group_name_of(group)
    if num_experts is None:
        if group_name:
            raise ValueError("moe_layer: num_experts: expected the number of experts in the whole group, got None")
        num_experts = w_gate_up.shape[0]
    leading = x.shape[:-1]
    y = torch.ops.moe.dispatch_gemm_combine(
        _flat("x", x, leading),
        _flat("topk_idx", topk_idx, leading),
        _flat("topk_weights", topk_weights, leading),
        w_gate_up,
        w_down,
        bias_gate_up,
        bias_down,
        main_grad_gate_up,
        main_grad_down,
        num_experts=num_experts,
        group_name=group_name,
        activation=activation,
        alpha=alpha,
        limit=limit,
        backend=backend,
        transport=transport,
        row_capacity=row_capacity,
        recompute=recompute,
    )
    return y if x.dim() == 2 else y.reshape(x.shape)
