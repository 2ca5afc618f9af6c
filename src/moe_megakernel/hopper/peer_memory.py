"""The memory that the ranks of a group share for the `peer` transport, made by all of them together for all layers.

PyTorch symmetric memory: every rank allocates one piece and maps those of the others; flags, tokens, routes and rows
lie in it (`kernels/include/moe/plan/layout.h`). Each rank has a workspace of its own beside it. Both live until a call
needs more, which all ranks then see alike, or until `rebuild`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GroupError
from .device_status import StatusRecord, add_group_record

if TYPE_CHECKING:
    from ..distributed.group import Group

#: Set while memory is mapped: multicast would map it a second time, and nothing here uses it.
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
#: Allows ranks to share a device; read by torch.
OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def device_identity(device: torch.device) -> dict[str, str]:
    """What other ranks need to know of this one's device: its host, the device, and whether it may be shared."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return {
        "host": host,
        "device": str(torch.cuda.get_device_properties(device).uuid),
        "overlap": os.environ.get(OVERLAP, ""),
    }


def sharing_fault(identities: list[dict[str, Any]], across_hosts: bool) -> str:
    """Why these ranks cannot share memory as far as their identities tell, or "".

    Args:
        identities: of every rank, see `device_identity`.
        across_hosts: whether ranks on different hosts may try.
    """
    hosts = [identity["host"] for identity in identities]
    for rank, host in enumerate(hosts):
        if host != hosts[0] and not across_hosts:
            return f'ranks 0 and {rank} are on different hosts (transport="peer" tries it nevertheless)'
    places = [identity["device"] for identity in identities]
    for rank, place in enumerate(places):
        first = places.index(place)
        if first != rank and not identities[first]["overlap"] == identities[rank]["overlap"] == "1":
            return f"ranks {first} and {rank} are on one device and {OVERLAP}=1 is not set"
    return ""


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


class PeerMemory:
    """Shared memory and workspace of one rank, with the order in which streams use them."""

    def __init__(self, group: Group, device: torch.device, shared_bytes: int, workspace_bytes: int) -> None:
        """Collective: every rank of the group makes one of the same size, and meets the others behind it."""
        import torch.distributed._symmetric_memory as symmetric

        self.device = device
        self.shared_bytes, self.workspace_bytes = shared_bytes, workspace_bytes
        with _without_multicast():
            self._shared: Tensor = symmetric.empty(shared_bytes, dtype=torch.uint8, device=device)
            self._handle: Any = symmetric.rendezvous(self._shared, group.name)  # type: ignore[arg-type]
        # Flags and the generation begin at zero; peers may raise theirs as soon as all are past the next gate.
        self._shared.zero_()
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self.workspace[:4096].zero_()
        torch.cuda.synchronize(device)
        status = torch.zeros(StatusRecord.NUM_WORDS, dtype=torch.int64, pin_memory=True)
        self.status = StatusRecord(device, status, group)
        add_group_record(self.status)
        self._bases = int(self._handle.buffer_ptrs_dev)
        self._own = int(self._handle.buffer_ptrs[group.rank])
        self._ranks, self._rank = group.ranks, group.rank
        self._numbers: dict[tuple[int, int, int], Tensor] = {}
        self._last: torch.cuda.Stream | None = None
        self._last_handle = 0
        #: A CUDA graph has been captured over this memory: it must outlive a larger one.
        self.captured = False

    def holds(self, shared_bytes: int, workspace_bytes: int) -> bool:
        """Whether a call that needs this much fits."""
        return shared_bytes <= self.shared_bytes and workspace_bytes <= self.workspace_bytes

    def numbers(self, max_tokens: int, row_capacity: int, needs: int) -> Tensor:
        """The argument `group` of the launch ops, PeerGroup of `kernels/include/moe/peer/memory.h`."""
        key = (max_tokens, row_capacity, needs)
        found = self._numbers.get(key)
        if found is None:
            values = [self._ranks, self._rank, *key, self._bases, self._own, self.shared_bytes]
            found = self._numbers[key] = torch.tensor(values, dtype=torch.int64)
        return found

    def order(self, op: str) -> None:
        """Puts the current stream behind the launches that another stream has made here before.

        Raises:
            GroupError: that cannot be: a capture is under way on one of the two streams alone.
        """
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        capturing = torch.cuda.is_current_stream_capturing()
        self.captured = self.captured or capturing
        if handle == self._last_handle and self._last is not None:
            return
        current = torch.cuda.current_stream(self.device)
        last, self._last, self._last_handle = self._last, current, handle
        if last is None:
            return
        with torch.cuda.stream(last):
            last_captures = torch.cuda.is_current_stream_capturing()
        if last_captures and not capturing:
            self._last, self._last_handle = last, last.cuda_stream
            raise GroupError(
                f"{op}: stream: expected no other use of the group's memory while a CUDA graph with it is captured, "
                "got a call on another stream"
            )
        if capturing and not last_captures:
            return  # what runs before a replay is ordered by whoever replays
        try:
            current.wait_event(last.record_event())
        except RuntimeError as error:  # two captures
            self._last, self._last_handle = last, last.cuda_stream
            raise GroupError(f"{op}: stream: expected one capture with the group's memory, got two at once") from error
