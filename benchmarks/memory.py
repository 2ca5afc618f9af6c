"""What one training step of an implementation takes of the device's memory, beside its inputs and parameters."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moe_megakernel.hopper.workspaces import release_workspaces, workspaces_bytes

from . import report
from .gradients import make_step
from .layers import Layer


@dataclass(frozen=True)
class Memory:
    """Bytes. saved: what autograd keeps from forward to backward, beside inputs and parameters; workspace: what the
    kernels keep between calls; peak: the most of a step that was there at once above what was there before it,
    gradients and the workspace included.
    """

    saved: int
    workspace: int
    peak: int


@dataclass(frozen=True)
class Row(report.Origin):
    """A line of memory.csv."""

    impl: str
    saved_bytes: int
    workspace_bytes: int
    peak_bytes: int


def saved_bytes(layer: Layer, name: str, combine: str, dy: Tensor) -> int:
    """Bytes of the storages that autograd keeps and that were not there before."""
    own = {t.untyped_storage().data_ptr() for t in (layer.x, layer.topk_idx, layer.topk_weights)}
    own |= {t.untyped_storage().data_ptr() for t in (layer.w_gate_up, layer.w_down)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage: Any = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step = make_step(layer, name, combine, dy)
        del step
    return sum(kept.values())


def measure(layer: Layer, name: str, combine: str, dy: Tensor) -> Memory:
    """Runs two steps of an implementation on a CUDA device, from an allocator and a workspace that are empty."""
    release_workspaces()
    saved = saved_bytes(layer, name, combine, dy)
    release_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = make_step(layer, name, combine, dy)
    gradients = step.gradients()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    workspace = workspaces_bytes()
    del step, gradients
    return Memory(saved, workspace, peak)


def make_row(letter: str, layer: Layer, commit: str, name: str, memory: Memory) -> Row:
    shape = layer.shape
    assert shape.tokens is not None
    return Row(
        **report.origin(letter, shape, commit),
        impl=name,
        **{f"{field}_bytes": value for field, value in asdict(memory).items()},
    )


def text(name: str, memory: Memory) -> str:
    parts = ", ".join(f"{field} {value / 2**20:.0f} MiB" for field, value in asdict(memory).items())
    return f"memory of a step, {name}: {parts}"
