"""What one training step of an implementation takes of the device's memory, beside its inputs and parameters."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hopper.workspaces import release_workspaces, workspaces_bytes
from .implementation import Bound
from .problem import Problem


class Memory(NamedTuple):
    """Bytes. saved: what autograd keeps from forward to backward, beside inputs and parameters; workspace: what our
    kernels keep between calls; peak: the most of a step that was there at once above what was there before it,
    gradients and the workspace included (0 on a CPU, where nobody counts).
    """

    saved: int
    workspace: int
    peak: int


def saved_bytes(bound: Bound, problem: Problem) -> int:
    """Bytes of the storages that autograd keeps and that were not there before."""
    there = {t.untyped_storage().data_ptr() for t in (*bound.leaves, *problem.leaves, problem.topk_idx)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr()
        if address not in there:
            kept[address] = tensor.detach()  # alive, so that no other tensor takes its address
        return None  # no backward follows; an output that is packed as itself holds its graph, for good

    def unpack(_: Any) -> Any:
        raise AssertionError("nothing was kept")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = bound.function(*bound.leaves)
        del y
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def measure_memory(bound: Bound, problem: Problem) -> Memory:
    """Runs an eager step of an implementation, from an allocator and a workspace that are empty."""
    release_workspaces()
    saved = saved_bytes(bound, problem)
    if problem.device.type != "cuda":
        return Memory(saved, 0, 0)
    release_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = bound.function(*bound.leaves)
    gradients = torch.autograd.grad(y, bound.leaves, problem.dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del y, gradients
    return Memory(saved, workspaces_bytes(), peak)
