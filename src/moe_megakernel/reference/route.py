"""route: sorts one rank's routes to expert-major order, in plain PyTorch.

The twin of `kernels/include/moe/plan/route.h`, which the op `moe::route` runs on CPU; this one serves CUDA tensors and
installations without the native library. Row order inside an expert: (t mod 64, t div 64, k), see docs/architecture.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens are dealt into this many classes by index, so that a contiguous split over ranks keeps one order.
TOKEN_CLASSES = 64


def route(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the routes r = t * K + k of one rank.

    Args:
        topk_idx: int32 or int64 [T, K]; -1 drops a route, any other id outside [0, num_experts) is skipped and
            reported.
        num_experts: E.

    Returns:
        route_order: int32 [T * K], valid routes by (expert, t mod 64, t div 64, k), then -1.
        class_counts: int32 [E, 64], routes per expert and t mod 64.
        first_bad: int64 [1], flat position of the first invalid id, or -1.
    """
    tokens, top_k = topk_idx.shape
    device = topk_idx.device
    ids = topk_idx.reshape(-1).to(torch.int64)
    routes = torch.arange(tokens * top_k, device=device)
    token = routes // top_k
    valid = (ids >= 0) & (ids < num_experts)
    classes = torch.where(valid, ids * TOKEN_CLASSES + token % TOKEN_CLASSES, num_experts * TOKEN_CLASSES)
    # Routes of one class keep their order, which is (t div 64, k); a stable sort needs no further key.
    sorted_classes, order = torch.sort(classes, stable=True)
    bounds = torch.searchsorted(sorted_classes, torch.arange(num_experts * TOKEN_CLASSES + 1, device=device))
    counts = bounds.diff().view(num_experts, TOKEN_CLASSES)
    route_order = torch.where(routes < bounds[-1], order, -1)
    bad = ~valid & (ids != -1)
    first = torch.where(bad, routes, tokens * top_k).amin().view(1) if tokens else routes.new_full((1,), 0)
    first_bad = torch.where(first < tokens * top_k, first, -1)
    return route_order.to(torch.int32), counts.to(torch.int32), first_bad
