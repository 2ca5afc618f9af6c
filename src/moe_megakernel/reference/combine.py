"""combine: sums a token's K rows on its own rank, forward with the routing weights, backward without.

float32 (float64 for float64) sums over routes in ascending k, rounded once. Rows are never summed on the expert's rank,
so the result does not depend on how experts are split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .numerics import compute_dtype


def scatter_rows(rows: Tensor, routes: Tensor, num_routes: int) -> Tensor:
    """Places rows [n, ...] at their routes: -> [num_routes, ...], zero where no row arrived."""
    out = rows.new_zeros((num_routes, *rows.shape[1:]))
    return out.index_copy_(0, routes.long(), rows)


def combine(rows: Tensor, topk_weights: Tensor | None, topk_idx: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y[t] = sum over k of weight[t, k] * rows[t, k].

    Args:
        rows: [T, K, H], zero at dropped routes.
        topk_weights: [T, K], or None for plain sums (the backward of dispatch).
        topk_idx: [T, K]; where it is negative the weight has no effect, whatever its value. None with plain sums.
        dtype: of the result.

    Returns:
        [T, H].
    """
    compute = compute_dtype(dtype)
    tokens, top_k, hidden = rows.shape
    total = torch.zeros((tokens, hidden), dtype=compute, device=rows.device)
    weights = None
    if topk_weights is not None and topk_idx is not None:
        weights = torch.where(topk_idx >= 0, topk_weights.to(compute), 0.0)
    for k in range(top_k):
        row = rows[:, k].to(compute)
        total += row if weights is None else row * weights[:, k : k + 1]
    return total.to(dtype)
