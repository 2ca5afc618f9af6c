"""The kernels' working memory: one workspace for each device and stream, kept from call to call. (Groups that share
memory have their own, see `peer_memory`.)

Launches on one stream follow each other, so they share memory; launches on two streams may run at once and never do.
The first bytes of a workspace are zeroed once, when it is allocated: flags and the generation in them live from launch
to launch. It backs no tensor that a user can hold. Called by `hopper.forward`
and `hopper.backward`, whose launches share it; `device_status` drops a device's
workspaces after a timeout.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .. import contexts

#: Leading bytes that must be zero before the first launch, kZeroedBytes in `moe/plan/layout.h`. The rest may hold
#: anything: a launch writes there before it reads.
ZEROED_BYTES = 4096

_lock = threading.Lock()
#: By device index and stream. Torch never destroys its streams; a handle that another library reuses means the same
#: order of launches.
_cache: dict[tuple[int, int], Tensor] = {}


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _new_workspace(num_bytes: int, device: torch.device) -> Tensor:
    workspace = _allocate(num_bytes, device)
    workspace[:ZEROED_BYTES].zero_()
    return workspace


def current_stream(index: int) -> int:
    """The handle of the device's current stream, without making a Stream object."""
    return torch._C._cuda_getCurrentRawStream(index)


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def get_workspace(device: torch.device, num_bytes: int) -> Tensor:
    """A workspace of at least `num_bytes` for a launch on the current stream of `device`.

    While a CUDA graph is captured it is a new one that is not kept: it belongs to the graph's memory pool, its zeroing
    is part of the graph, and replays do not meet other launches in it.

    Args:
        device: with its index; the current device.
        num_bytes: of `hopper_workspace_bytes` or `hopper_backward_workspace_bytes`.
    """
    if capturing():
        return _new_workspace(num_bytes, device)
    key = (device.index, current_stream(device.index))
    found = _cache.get(key)
    if found is not None and found.numel() >= num_bytes:
        return found
    # Memory that it outgrows goes back first, so that both are never there at once, and in stream order: whatever still
    # runs there is finished before it is used again.
    found = None
    _drop_smaller(key, num_bytes)
    fresh = _new_workspace(num_bytes, device)
    with _lock:
        found = _cache.get(key)
        if found is not None and found.numel() >= num_bytes:  # another thread was first
            return found
        _cache[key] = fresh
    return fresh


def _drop_smaller(key: tuple[int, int], num_bytes: int) -> None:
    with _lock:
        kept = _cache.get(key)
        if kept is not None and kept.numel() < num_bytes:
            del _cache[key]
            contexts.release()  # they hold it


def drop_workspaces(index: int) -> None:
    """Forgets the workspaces of one device: after a timeout their counters mean nothing, and calls get new ones."""
    with _lock:
        for key in [key for key in _cache if key[0] == index]:
            del _cache[key]
    contexts.forget()


def release_workspaces() -> None:
    """Gives the memory that the kernels keep between calls back to torch's allocator; the next call allocates again.

    Calls that still run are not disturbed. CUDA graphs have workspaces of their own and keep them.
    """
    with _lock:
        _cache.clear()
    contexts.forget()


def workspaces_bytes() -> int:
    """Bytes that are kept now, over all devices and streams."""
    with _lock:
        return sum(workspace.numel() for workspace in _cache.values())
