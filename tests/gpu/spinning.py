"""A foreign kernel in Triton that keeps part of the device busy for a while. Import it where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit
def _spin(out, nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
    tl.store(out + tl.program_id(0), now - begin)


def occupy(stream: torch.cuda.Stream, blocks: int, milliseconds: float) -> Tensor:
    """Starts `blocks` blocks on `stream` that stay for that long; returns the nanoseconds that each has taken.

    One block is enough to keep a block of the fused kernels, which takes all registers of an SM, from that SM.
    """
    out = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _spin[(blocks,)](out, int(milliseconds * 1e6), num_warps=4)
    return out
