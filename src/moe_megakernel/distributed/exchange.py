"""Moves rows between ranks by `torch.distributed` collectives, and knows which row belongs where.

The `collective` transport: one all-gather of class counts and one all-to-all per kind of row; host memory for gloo,
device memory for NCCL. `RowPlan` turns the counts into splits and into the row order that does not depend on the
number of ranks: by `moe::merge_rows`, the code that kernels share, or by its twin in PyTorch without the library.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _native
from ..config import get_timeout
from ..errors import MoEError
from ..reference.route import TOKEN_CLASSES
from .group import Group
from .partition import expert_range

#: Seconds between two looks at a collective in flight, doubling from the shorter to the longer.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
#: Seconds between two looks at the group's failure record meanwhile.
_LOOK = 0.5


@dataclass(frozen=True)
class RowPlan:
    """Where this rank's rows go and which rows it gets.

    send, receive: rows to and from each rank. expert_offsets: int32 [L + 1], rows of each local expert. row_order:
    int32 [R], for each row in expert order its position in the receive buffer.
    """

    send: list[int]
    receive: list[int]
    expert_offsets: Tensor
    row_order: Tensor


def plan_rows(counts: Tensor, starts: list[int], rank: int) -> RowPlan:
    """Builds the row plan of one rank from all ranks' class counts.

    Args:
        counts: integer [W, E, 64] on CPU, routes per rank, expert and t mod 64.
        starts: global index of each rank's first token.
        rank: this rank.
    """
    return _plan_rows_native(counts, starts, rank) if _native.load() else plan_rows_in_torch(counts, starts, rank)


def _plan_rows_native(counts: Tensor, starts: list[int], rank: int) -> RowPlan:
    """`plan_rows` by `moe::merge_rows`, which names each row by its position in the sender's whole route order."""
    counts = counts.to(torch.int32).contiguous()
    offsets, sources, send, receive = torch.ops.moe.merge_rows(counts, torch.tensor(starts), rank)
    ranks, num_experts, _ = counts.shape
    first_sent = counts[:, : expert_range(num_experts, rank, ranks).start].sum((1, 2))
    begin = receive.cumsum(0) - receive - first_sent
    row_order = begin[sources[:, 0].long()] + sources[:, 1]
    return RowPlan(send.tolist(), receive.tolist(), offsets.to(torch.int32), row_order.to(torch.int32))


def plan_rows_in_torch(counts: Tensor, starts: list[int], rank: int) -> RowPlan:
    """`plan_rows` in PyTorch.

    The receive buffer holds, rank after rank, the sender's order (expert, t mod 64, t div 64, k) with its local t.
    Rows are wanted by (expert, g mod 64, g div 64, k) with the global token index g = start of the rank + t. A class
    of g on a rank is one class of its t, and ranks hold ascending g, so whole (rank, expert, class) blocks are
    permuted.
    """
    ranks, num_experts, _ = counts.shape
    counts = counts.long()
    per_expert = counts.sum(2)
    ranges = [expert_range(num_experts, r, ranks) for r in range(ranks)]
    mine = ranges[rank]
    send = [int(per_expert[rank, q.start : q.stop].sum()) for q in ranges]
    receive = per_expert[:, mine.start : mine.stop].sum(1).tolist()
    blocks = counts[:, mine.start : mine.stop]
    begins = (blocks.reshape(-1).cumsum(0) - blocks.reshape(-1)).view(blocks.shape)
    classes = torch.arange(TOKEN_CLASSES)
    local = (classes[:, None] - torch.tensor(starts)[None, :]) % TOKEN_CLASSES
    at = (torch.arange(ranks)[None, None, :], torch.arange(len(mine))[:, None, None], local[None])
    lengths, begin = blocks[at].reshape(-1), begins[at].reshape(-1)
    shift = begin - (lengths.cumsum(0) - lengths)
    row_order = torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()))
    expert_offsets = torch.zeros(len(mine) + 1, dtype=torch.int32)
    expert_offsets[1:] = per_expert[:, mine.start : mine.stop].sum(0).cumsum(0)
    return RowPlan(send, receive, expert_offsets, row_order.to(torch.int32))


class Collective:
    """The collectives of one call on one group; every error becomes a `GroupError` that names op, phase and rank."""

    def __init__(self, group: Group, op: str, device: torch.device) -> None:
        self._group, self._op, self._device = group, op, device
        # NCCL takes CUDA tensors; gloo's all-to-all runs on the host.
        backend = dist.get_backend(group.pg)
        self._transport_device = device if device.type == "cpu" or "nccl" in backend else torch.device("cpu")

    def _run(self, phase: str, function: Any, *args: Any) -> None:
        """Starts a collective and waits for it, looking now and then whether a rank has failed meanwhile."""
        try:
            work = function(*args, group=self._group.pg, async_op=True)
            deadline = time.monotonic() + get_timeout()
            look, pause = time.monotonic() + _LOOK, _SHORTEST_PAUSE
            while work is not None and not work.is_completed() and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if time.monotonic() > look:
                    self._group.raise_if_reported(self._op, phase, in_collective=True)
                    look = time.monotonic() + _LOOK
            if work is not None:
                work.wait(
                    timedelta(seconds=0.001) if time.monotonic() >= deadline else timedelta(seconds=get_timeout())
                )
        except MoEError:
            raise
        except Exception as error:
            self._group.transport_failed(self._op, phase, error)
        except BaseException:  # an interrupt leaves the collective in flight
            self._group.broken = True
            raise

    def all_gather(self, phase: str, tensor: Tensor) -> Tensor:
        """[...] on every rank -> [W, ...] on CPU."""
        tensor = tensor.to(self._transport_device).contiguous()
        out = torch.empty((self._group.ranks, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._run(phase, dist.all_gather, list(out.unbind(0)), tensor)
        return out.cpu()

    def all_to_all(self, phase: str, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Rows [sum(send), ...] in rank order -> [sum(receive), ...] in rank order, any dtype."""
        shape = (sum(receive), *rows.shape[1:])
        # As bytes, since not every backend knows every dtype.
        columns = math.prod(rows.shape[1:])
        raw = rows.to(self._transport_device).contiguous().view(rows.shape[0], columns).view(torch.uint8)
        out = torch.empty((shape[0], raw.shape[1]), dtype=torch.uint8, device=raw.device)
        self._run(phase, dist.all_to_all_single, out, raw, receive, send)
        return out.view(rows.dtype).view(shape).to(self._device)
