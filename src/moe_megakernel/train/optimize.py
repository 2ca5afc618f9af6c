"""What happens between `loss.backward()` and `optimizer.step()`: gradients of all ranks, one clip, the learning rate.

Called by `loop.py`. The layer's gradients are sums over the tokens of all ranks, so expert weights are complete when
backward ends; every other parameter has seen only its rank's tokens and is summed here. The loss is already divided by
the tokens of the global batch, so sums need no averaging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
WARMUP_FRACTION = 0.05
FINAL_LR_FRACTION = 0.05


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """AdamW over `parameters`, without decay on vectors (norm scales and biases)."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a twentieth of the run, then a cosine down to a twentieth of the peak; steps from 0."""
    warmup = max(1, round(WARMUP_FRACTION * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress)))


def sum_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces every tensor by its sum over the ranks of `group`, in one collective; all share one dtype and device."""
    if group is None or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def clip_gradients(replicated: Sequence[Tensor], sharded: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Scales all gradients so that their norm over the whole model is MAX_GRAD_NORM at most; returns the norm before.

    `replicated` gradients are equal on all ranks and count once, `sharded` ones are this rank's part and are summed
    over the ranks, so that every rank computes the same norm and the same scale.
    """
    squares = torch.zeros((), dtype=torch.float64, device=replicated[0].device)
    for gradient in sharded:
        squares += torch.linalg.vector_norm(gradient).double() ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    for gradient in replicated:
        squares += torch.linalg.vector_norm(gradient).double() ** 2
    norm = squares.sqrt()
    scale = (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*replicated, *sharded):
        gradient.mul_(scale.to(gradient.dtype))
    return norm
