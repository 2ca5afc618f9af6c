"""Accepts expert weights that are DTensors sharded over the expert group, and refuses every other placement with
advice."""

from __future__ import annotations

import sys

from torch import Tensor

OP = "dispatch_gemm_combine"


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether `tensor` is a DTensor; does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_weight(name: str, tensor: Tensor, group_name: str, has_main_grad: bool = False) -> Tensor:
    """The local shard of an expert weight; differentiable, its gradient is a DTensor of the same placement.

    Args:
        name: the argument, for messages.
        tensor: plain tensors pass through. A DTensor must lie on a one-dimensional mesh over the expert group with
            placement Shard(0).
        group_name: the expert group.

    Raises:
        ValueError: another mesh or placement.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    advice = "redistribute it, or pass the local shard that expert_range names"
    if mesh.ndim != 1 or tuple(placements) != (Shard(0),):
        raise ValueError(
            f"{OP}: {name}: expected a DTensor with placement Shard(0) on a one-dimensional mesh over the expert group "
            f"(for a larger mesh take mesh['expert']), got {tuple(placements)} on a mesh of shape "
            f"{tuple(mesh.shape)}; {advice}"
        )
    mesh_group = mesh.get_group(0).group_name
    if mesh_group != group_name:
        raise ValueError(
            f"{OP}: {name}: expected a DTensor on the expert group {group_name!r}, got one on {mesh_group!r}; {advice}"
        )
    local = tensor.to_local()  # type: ignore[attr-defined]
    return local.detach().requires_grad_(tensor.requires_grad) if has_main_grad else local


def refuse_dtensor(name: str, tensor: Tensor | None) -> None:
    """Raises TypeError for a DTensor where only this rank's own rows make sense (tokens, routing, main gradients)."""
    if is_dtensor(tensor):
        raise TypeError(f"{OP}: {name}: expected a plain tensor of this rank, got a DTensor; pass {name}.to_local()")
