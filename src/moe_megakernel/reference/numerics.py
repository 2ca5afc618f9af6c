"""Arithmetic shared by the reference stages: where values are rounded, and sums whose bits depend on nothing else.

The rules are those of docs/numerics.md: operands in the storage dtype, products and sums in `compute_dtype`, one
rounding where a tensor is stored. Bits must not change with the number of ranks, so operands reach the matrix product
in fresh, aligned buffers and row sums are folded in a fixed tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Columns of one partial sum of the router-weight gradient.
PARTIAL_COLUMNS = 128
#: Bytes. BLAS libraries promise equal bits only for equally aligned operands (64 bytes for MKL).
ALIGNMENT = 64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products, sums, activation and combine: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which one row per route (o and dx) is stored before the combine.

    The storage dtype, but float32 for float16: unweighted expert outputs would overflow its range.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, contiguous and aligned; copied unless it already is all three."""
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def tree_sum(values: Tensor) -> Tensor:
    """Sums the last axis of `values` [n, width] in an order that depends on `width` only.

    Columns are padded with zeros to whole groups of 128, each group is folded in halves (64 + 64, 32 + 32, ...), then
    the groups' partials are folded likewise. Only elementwise additions, so that a row's bits do not depend on the
    others.
    """
    rows, width = values.shape
    groups = max(1, -(-width // PARTIAL_COLUMNS))
    partials = values.new_zeros(rows, groups * PARTIAL_COLUMNS)
    partials[:, :width] = values
    return _fold(_fold(partials.view(rows, groups, PARTIAL_COLUMNS)))


def _fold(values: Tensor) -> Tensor:
    """Adds the upper half of the last axis to the lower one until one column is left, and drops that axis."""
    while (width := values.shape[-1]) > 1:
        half = -(-width // 2)
        lower = values[..., :half].clone()
        lower[..., : width - half] += values[..., half:]
        values = lower
    return values[..., 0]
