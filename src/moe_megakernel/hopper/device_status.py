"""What a launch reports when a step fails: one record in pinned memory for each device, read without waiting for it.

The twin of `kernels/include/moe/forward/status.h`: the device writes values, then a code; the host polls the code at
every forward call (`errors.raise_pending`) and after synchronising (`check_errors`), turns the record into an error and
clears it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import contexts
from ..errors import GroupError, MoEError, add_source, defer, invalid_id
from ..plan_names import Counter, Role, TaskKind
from .workspaces import drop_workspaces

if TYPE_CHECKING:
    from ..distributed.group import Group

OP = "dispatch_gemm_combine"
#: Words of a record: the code and kStatusValues values.
NUM_WORDS = 16


class StatusCode(IntEnum):
    """`StatusCode` in `moe/forward/status.h`."""

    NONE = 0
    BAD_ID = 1
    TIMEOUT = 2
    MISMATCH = 3
    MANY_TOKENS = 4
    FULL = 5
    PEER_ABORTED = 6
    PEER_REFUSED = 7


class StatusRecord:
    """The record of one device, or of one group's launches there.

    `tensor` is what the op takes, `words` the same memory without torch between.
    """

    NUM_WORDS = NUM_WORDS

    def __init__(self, device: torch.device, tensor: Tensor, group: Group | None = None) -> None:
        self.device = device
        self.tensor = tensor
        self.group = group
        self.words = (ctypes.c_int64 * NUM_WORDS).from_address(tensor.data_ptr())

    def take(self) -> MoEError | None:
        """The error that the device has left, if there is one; clears the record for the next."""
        code, *values = self.words
        if code == StatusCode.NONE:
            return None
        self.words[0] = StatusCode.NONE
        if self.group is not None:
            from .peer_status import decode_group

            error = decode_group(code, values)
            if isinstance(error, GroupError):  # the group's memory is in disorder
                self.group.fail(f"rank {self.group.rank} reports: {error}")
            return error
        if code != StatusCode.BAD_ID:  # a refused step leaves its workspace in order, one that ran out of time does not
            drop_workspaces(self.device.index)
        return decode(code, values)


_lock = threading.Lock()
_records: dict[int, StatusRecord] = {}
#: Of groups; weak, because a group's memory owns its record.
_group_records: weakref.WeakSet[StatusRecord] = weakref.WeakSet()


def add_group_record(record: StatusRecord) -> None:
    """From now on errors are looked for in a group's record too."""
    with _lock:
        _group_records.add(record)
    contexts.forget()


def has_group_records() -> bool:
    """Whether errors are looked for in records of groups, too."""
    return bool(_group_records)


def status_record(device: torch.device) -> StatusRecord:
    """The record of a CUDA device, made at its first use.

    Raises:
        MoEError: the first use is under capture of a CUDA graph, where pinned memory cannot be allocated.
    """
    found = _records.get(device.index)
    if found is not None:
        return found
    with _lock:
        if device.index not in _records:
            if torch.cuda.is_current_stream_capturing():
                raise MoEError(
                    f"{OP}: expected a call on {device} before a CUDA graph is captured there, got none; "
                    "run the layer once, then capture"
                )
            tensor = torch.zeros(NUM_WORDS, dtype=torch.int64, pin_memory=True)
            _records[device.index] = StatusRecord(device, tensor)
        return _records[device.index]


def poll(device: torch.device | None) -> None:
    """Hands what a device (None: any) has left to `errors.defer`. Reads host memory only."""
    if _group_records:
        for record in list(_group_records):
            if device is None or record.device == device:
                _poll(record)
    if not _records:
        return
    if device is None:
        for record in list(_records.values()):
            _poll(record)
        return
    found = _records.get(device.index)
    if found is not None and found.words[0] and device.type == "cuda":  # the type last: asking for it costs the most
        _poll(found)


def _poll(record: StatusRecord) -> None:
    if record.words[0] == StatusCode.NONE:
        return
    with _lock:
        error = record.take()
    if error is not None:
        defer(record.device, error)


def decode(code: int, values: Sequence[int]) -> MoEError:
    """The error that a record means.

    Args:
        code: a `StatusCode`.
        values: the words behind it, see `moe/forward/status.h`.
    """
    if code == StatusCode.BAD_ID:
        position, value, top_k, num_experts = values[:4]
        return invalid_id(OP, position, value, top_k, num_experts)
    if code == StatusCode.TIMEOUT:
        block, role, task, ticket, counter, index, expected, seen, timeout_ns = values[:9]
        return MoEError(
            f"{OP}: timeout: expected {_name(Counter, counter)}[{index}] to reach {expected} within "
            f"{timeout_ns / 1e9:g} s, got {seen}; block {block}, role {_name(Role, role)}, "
            f"task {_name(TaskKind, task)}, ticket {ticket}; the step's outputs are NaN"
        )
    return MoEError(f"{OP}: expected a known status of the kernels, got code {code} with values {list(values)}")


def _name(names: type[IntEnum], number: int) -> str:
    """`gate_up` for TaskKind 0; the number itself where nothing has it, for instance -1: no task."""
    try:
        return names(number).name.lower()
    except ValueError:
        return str(number)


add_source(poll)
