"""Makes tensors lie in memory as the kernels read them, copying only those that do not.

Rows of x and of the weights travel by bulk copies and TMA: contiguous, 16-byte aligned, rows and experts a multiple of
16 bytes apart. A stride of 0, as `expand` makes it, is fine. Called by `hopper.forward`; sizes are multiples of 8
already (`support.kernel_fault`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES = 16
_ELEMENTS = 8  # of bfloat16


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy; `contiguous` would return a tensor that is only misaligned as it is."""
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_rows(tensor: Tensor) -> Tensor:
    """The bfloat16 tensor, or a copy of it, with rows that the kernels can read. For x and both weights."""
    *outer, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % _BYTES:
        return _copy(tensor)
    for stride in outer:
        if stride % _ELEMENTS:
            return _copy(tensor)
    return tensor


def aligned_bias(bias: Tensor | None) -> Tensor | None:
    """The bias, or a copy of it, contiguous and aligned; None stays None."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % _BYTES == 0):
        return bias
    return _copy(bias)
