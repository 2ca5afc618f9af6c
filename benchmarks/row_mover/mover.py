"""One rank's memory and launches: a buffer shared with the other ranks, and rows that are moved and checked."""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from ..group import Rank
from .library import FLAG_BYTES, Library, Params
from .moves import DIRECTIONS, Traffic

#: What rows hold before they are moved.
_POISON = -21555
_ALIGNMENT = 4096


def buffer_layout(tokens: int, hidden: int, rows: int) -> tuple[int, int, int]:
    """Offsets of x [T, H] and rows [R, H] in a rank's buffer behind the flags, and its size; bytes."""

    def round_up(size: int) -> int:
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    x_offset = round_up(FLAG_BYTES)
    rows_offset = round_up(x_offset + tokens * hidden * 2)
    return x_offset, rows_offset, round_up(rows_offset + rows * hidden * 2)


class Mover:
    """Holds one rank's end. Every method but `check` is called by all ranks in the same order.

    Args:
        library: that launches.
        rank: this one.
        traffic: of all ranks.
        tokens, hidden: T of every rank, H.
        timeout: seconds after which a launch gives up.
        seed: of x; x of rank r is random bits of seed + r.
    """

    def __init__(
        self,
        library: Library,
        rank: Rank,
        traffic: Traffic,
        tokens: int,
        hidden: int,
        timeout: float,
        seed: int = 0,
    ) -> None:
        self._library, self._rank, self._traffic = library, rank, traffic
        self._tokens, self._hidden, self._seed = tokens, hidden, seed
        self.blocks, self.warps = 1, 1  # of a launch
        x_offset, rows_offset, size = buffer_layout(tokens, hidden, max(traffic.received))
        # Kept, since the memory lives as long as these do.
        self._buffer = symmetric.empty(size, dtype=torch.uint8, device=rank.device)
        self._buffer.zero_()
        self._handle = symmetric.rendezvous(self._buffer, rank.group)
        if self._handle.buffer_ptrs[rank.rank] != self._buffer.data_ptr():
            raise RuntimeError("row_mover: buffer: expected it at the begin of its symmetric memory, got another place")
        self._words = self._buffer.view(torch.int16)
        x = self._words[x_offset // 2 :][: tokens * hidden].view(tokens, hidden)
        x.copy_(self._make_x(rank.rank))
        self._rows = self._words[rows_offset // 2 :].view(-1)
        self._moves = {name: traffic.moves(name, rank.rank).to(rank.device) for name in DIRECTIONS}
        self._control = torch.zeros(4, dtype=torch.int32, device=rank.device)
        self._params = Params(
            buffers=self._handle.buffer_ptrs_dev,
            x_offset=x_offset,
            rows_offset=rows_offset,
            row_bytes=2 * hidden,
            control=self._control.data_ptr(),
            generation=0,
            timeout_ns=int(timeout * 1e9),
            ranks=rank.ranks,
            rank=rank.rank,
        )
        torch.cuda.synchronize()
        rank.meet()

    def meet(self) -> None:
        """Waits on the device for the other ranks: a common start."""
        self._params.generation += 1
        self._library.meet(self._params, torch.cuda.current_stream().cuda_stream)

    def move(self, direction: str) -> None:
        """Moves the rows of all ranks, and waits on the device until they are all there."""
        moves = self._moves[direction]
        self._params.generation += 1
        self._params.moves, self._params.num_moves = moves.data_ptr(), len(moves)
        self._params.moves_of_near_row = self._traffic.moves_of_near_row(direction)
        self._params.push = int(direction == "push")
        stream = torch.cuda.current_stream().cuda_stream
        self._library.move(self._params, self.blocks, self.warps, stream)

    def raise_failure(self) -> None:
        """Synchronises.

        Raises:
            RuntimeError: a launch ran out of time.
        """
        if int(self._control[2]):
            seconds = self._params.timeout_ns / 1e9
            raise RuntimeError(f"row_mover: rank {self._rank.rank}: expected rows and peers within {seconds:g} s")

    def test(self, direction: str) -> None:
        """Moves rows into a poisoned buffer and compares every bit.

        Raises:
            RuntimeError: bits differ, behind the last row too, or a launch ran out of time.
        """
        self._rows.fill_(_POISON)
        torch.cuda.synchronize()
        self._rank.meet()
        self.move(direction)
        self.raise_failure()
        self.check(direction)
        self._rank.meet()

    def check(self, direction: str) -> None:
        """Compares every row of this rank with the token that it should be."""
        received = self._traffic.received[self._rank.rank]
        rows = self._rows[: received * self._hidden].view(received, self._hidden)
        sources = self._traffic.pull[self._rank.rank].to(self._rank.device)
        wrong = 0
        for source in range(self._rank.ranks):
            here = (sources[:, 0] == source).nonzero()[:, 0]
            x = self._make_x(source)
            for part in here.split(16384):
                wrong += int((rows[part] != x[sources[part, 1]]).any(1).sum())
        behind = int((self._rows[received * self._hidden :] != _POISON).sum())
        if wrong or behind:
            raise RuntimeError(
                f"row_mover: rank {self._rank.rank}: {direction}: expected {received} right rows and nothing behind "
                f"them, got {wrong} wrong ones and {behind} changed words"
            )

    def _make_x(self, rank: int) -> Tensor:
        generator = torch.Generator(self._rank.device).manual_seed(self._seed + rank)
        size = (self._tokens, self._hidden)
        return torch.randint(-(2**15), 2**15, size, generator=generator, device=self._rank.device, dtype=torch.int16)
