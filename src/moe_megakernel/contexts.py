"""What calls need that go from C++ to the launch without Python (`kernels/bindings/layer_forward.cpp`): kept there by
device and stream, as a context of workspace, status record, SMs and timeout.

A forward that has gone through Python leaves the context it ran in. Whatever may make contexts wrong forgets all of
them, and then calls go through Python again, which finds out what is to be done: errors to raise, memory that was
given back, other settings, hooks of tests. Called by `hopper.forward`; `forget` by whoever changes such things.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_lock = threading.Lock()
_generation = 0
#: What is kept, so that the same is not kept again: by device index and stream.
_kept: dict[tuple[int, int], tuple[Tensor, Tensor, int, int]] = {}


def any_kept() -> bool:
    """Whether a call may go without Python at all."""
    return bool(_kept)


def generation() -> int:
    """A number that every `forget` changes, and no `release`. Asked for before what goes into a context is read."""
    return _generation


def keep(since: int, workspace: Tensor, status: Tensor, stream: int, num_sms: int, timeout_ns: int) -> None:
    """Keeps a context for later calls, unless something was forgotten meanwhile.

    Args:
        since: what `generation` was before the other arguments were read.
        workspace: of `workspaces.get_workspace` on this stream, not under capture of a graph.
        status: the tensor of the device's status record.
        stream: the handle of the workspace's stream.
        num_sms, timeout_ns: as the launch got them.
    """
    key = (workspace.device.index, stream)
    context = (workspace, status, num_sms, timeout_ns)
    with _lock:
        if since != _generation:
            return
        kept = _kept.get(key)
        if kept is not None and kept[0] is workspace and kept[1] is status and kept[2:] == context[2:]:
            return
        torch.ops.moe.hopper_keep_context(workspace, status, stream, num_sms, timeout_ns)
        _kept[key] = context


def forget() -> None:
    """Forgets all contexts: the next call of every device and stream goes through Python."""
    global _generation
    with _lock:
        _generation += 1
        _drop()


def release() -> None:
    """Gives up the workspaces that contexts hold, as a larger one takes a place: nothing kept was wrong, so calls under
    way, among them the one that asks for the larger, may still keep theirs.
    """
    with _lock:
        _drop()


def _drop() -> None:
    if _kept:
        _kept.clear()
        torch.ops.moe.hopper_forget_contexts()
