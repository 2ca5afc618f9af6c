"""Keeping experts evenly used: counts, auxiliary losses and the step of the loss-free bias.

Works on what the router returns and touches neither the op nor the experts. Called by training loops and by
`Router.update_correction_bias`. Every function runs without a host sync and under torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expert_counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Routes per expert: int64 [num_experts], from `topk_idx` of any shape.

    Ids outside [0, num_experts), so -1 too, are not counted.
    """
    flat = topk_idx.detach().reshape(-1).long()
    bucket = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add(0, bucket, torch.ones_like(bucket))[:num_experts]


def load_balancing_loss(
    logits: Tensor,
    topk_idx: Tensor,
    *,
    scores: str = "softmax",
    counts: Tensor | None = None,
) -> Tensor:
    """E * sum_e f_e * P_e: 1 when balanced, up to E when every token takes one expert. Multiply by your coefficient.

    f_e is the fraction of routes that expert e got (no gradient), P_e the mean over tokens of its probability. From
    Switch Transformer (arXiv 2101.03961, equations 4 to 6, K = 1), after GShard (arXiv 2006.16668, section 2.2); for
    K > 1 f counts all K choices and is divided by K. Some libraries leave that division out and report K times this.

    Args:
        logits: [..., E] from the router.
        topk_idx: [..., K]; -1 is not counted.
        scores: "softmax"; or "sigmoid", whose scores are divided by their sum over the experts first (DeepSeek-V3,
            arXiv 2412.19437, equation 19).
        counts: [E] to take f from instead of topk_idx, for instance summed over data-parallel ranks.

    Returns:
        a scalar in fp32 (fp64 for fp64 logits); 0 for no tokens.
    """
    num_experts = logits.shape[-1]
    flat = logits.reshape(-1, num_experts)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if scores == "softmax":
        probabilities = torch.softmax(flat, dim=-1)
    elif scores == "sigmoid":
        sigmoid = torch.sigmoid(flat)
        probabilities = sigmoid / (sigmoid.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        raise ValueError(f"load_balancing_loss: scores: expected softmax or sigmoid, got {scores!r}")
    if counts is None:
        counts = expert_counts(topk_idx, num_experts)
    fractions = counts.detach().to(flat.dtype)
    fractions = fractions / fractions.sum().clamp(min=1)
    mean_probabilities = probabilities.sum(dim=0) / max(flat.shape[0], 1)
    return num_experts * (fractions * mean_probabilities).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2: keeps logits [..., E] small (ST-MoE, arXiv 2202.08906, equation 5).

    A scalar in fp32 (fp64 for fp64 logits); 0 for no tokens.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return torch.logsumexp(flat, dim=-1).square().sum() / max(flat.shape[0], 1)


def bias_step(counts: Tensor, rate: float) -> Tensor:
    """What to add to the correction bias [E]: +rate for experts below the mean of `counts` [E], -rate above, 0 at it.

    Auxiliary-loss-free balancing (arXiv 2408.15664, algorithm 1), as used in DeepSeek-V3 (arXiv 2412.19437, section
    2.1.2). Exact in integers: the mean is never rounded.
    """
    counts = counts.detach().long()
    return rate * torch.sign(counts.sum() - counts * counts.numel()).to(torch.float32)
