"""Errors of the layer, and the errors of CUDA steps that are raised late.

On a CUDA device a step never synchronises with the host to report bad input: it returns NaN and leaves a message
here, or where a source finds it (`hopper.device_status` reads what kernels have written). The next forward call on that
device, or `check_errors`, raises it: the forward ops call `raise_pending` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from . import contexts


class MoEError(RuntimeError):
    """Base class of the errors that concern a whole step rather than one argument."""


class RoutingError(MoEError, IndexError):
    """An expert id in `topk_idx` is neither -1 nor in [0, num_experts)."""


class CapacityError(MoEError):
    """More tokens or rows than the group has agreed on; nothing was moved and the group stays usable."""


class MismatchError(MoEError):
    """The ranks of a group called the layer with arguments that must be equal but are not; the group stays usable."""


class GroupError(MoEError):
    """A rank of the group was late, raised or died; the group is unusable until every rank calls `rebuild`."""


def invalid_id(
    op: str, position: int, value: int, top_k: int, num_experts: int, rank: int | None = None
) -> RoutingError:
    """The error for an invalid expert id `value` at flat position t * top_k + k of topk_idx."""
    token, k = divmod(position, top_k)
    where = f"topk_idx[{token}, {k}]" + ("" if rank is None else f" on rank {rank}")
    return RoutingError(f"{op}: topk_idx: expected -1 or an expert id in [0, {num_experts}), got {value} at {where}")


_lock = threading.Lock()
_pending: dict[torch.device, MoEError] = {}
_sources: list[Callable[[torch.device | None], None]] = []


def add_source(poll: Callable[[torch.device | None], None]) -> None:
    """Registers what looks for errors of a device (None: of all) and hands them to `defer`, without waiting."""
    _sources.append(poll)


def defer(device: torch.device, error: MoEError) -> None:
    """Keeps the first error of `device` until `raise_pending` or `check_errors` takes it."""
    with _lock:
        _pending.setdefault(device, error)
    contexts.forget()


def raise_pending(device: torch.device) -> None:
    """Raises and forgets the error that an earlier step left for `device`, if there is one."""
    for poll in _sources:
        poll(device)
    if not _pending:
        return
    with _lock:
        error = _pending.pop(device, None)
    if error is not None:
        raise error


def forget_pending(device: torch.device, kind: type[MoEError]) -> None:
    """Forgets the error that an earlier step left for `device`, if it is of this kind."""
    for poll in _sources:
        poll(device)
    with _lock:
        if isinstance(_pending.get(device), kind):
            del _pending[device]


def check_errors() -> None:
    """Waits for all CUDA devices in use and raises the first error an earlier step left.

    Synchronises with the device. Needed where nothing calls the layer again soon, for instance after the replay of a
    CUDA graph. On CPU every error is raised by the call itself and this returns at once.

    Raises:
        MoEError: the error of an earlier step; it is forgotten afterwards.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
    for poll in _sources:
        poll(None)
    with _lock:
        error = next(iter(_pending.values()), None)
        _pending.clear()
    if error is not None:
        raise error
