"""Makes tensors lie in memory as the kernels read them, copying only those that do not.

Rows of x and of the weights travel by bulk copies and TMA: contiguous, 16-byte aligned, rows and experts a multiple of
16 bytes apart. Of x a stride of 0, as `expand` makes it, is fine; TMA, which reads weights, wants rows and experts at
least a row apart. Called by `hopper.forward` and `hopper.backward`; sizes are multiples of 8
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


def _fits(tensor: Tensor, least: int) -> bool:
    """Whether rows are contiguous and aligned, and other strides multiples of 16 bytes, at least `least` elements.

    The stride of a dimension of size 1 means nothing.
    """
    if tensor.data_ptr() % _BYTES:
        return False
    if tensor.is_contiguous() and tensor.shape[-1] % _ELEMENTS == 0:  # the most usual case; least is at most a row
        return True
    *outer, last = tensor.stride()
    if last != 1:
        return False
    for size, stride in zip(tensor.shape, outer, strict=False):  # the last dimension has none
        if size != 1 and (stride % _ELEMENTS or stride < least):
            return False
    return True


def aligned_rows(x: Tensor) -> Tensor:
    """x [T, H] in bfloat16, or a copy of it, with rows that bulk copies can read."""
    return x if _fits(x, 0) else _copy(x)


def separate_rows(x: Tensor) -> Tensor:
    """The same with rows that do not overlap, so that they can be copied to a group's memory.

    The stride of a single row is looked at, too: it is the pitch of that copy.
    """
    return x if _fits(x, x.shape[1]) and x.stride(0) >= x.shape[1] else _copy(x)


def aligned_weight(weight: Tensor) -> Tensor:
    """A weight [L, rows, columns] in bfloat16, or a copy of it, that TMA can read."""
    return weight if _fits(weight, weight.shape[2]) else _copy(weight)


def aligned_main_grad(main_grad: Tensor) -> Tensor:
    """A main gradient in float32, or a copy of it, contiguous and aligned; what is added to a copy is copied back."""
    return main_grad if main_grad.is_contiguous() and main_grad.data_ptr() % _BYTES == 0 else _copy(main_grad)


def aligned_bias(bias: Tensor | None) -> Tensor | None:
    """The bias, or a copy of it, contiguous and aligned; None stays None."""
    if bias is None or (bias.is_contiguous() and bias.data_ptr() % _BYTES == 0):
        return bias
    return _copy(bias)
