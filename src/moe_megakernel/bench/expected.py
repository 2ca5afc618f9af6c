"""What the numbers should be: a part of every result in float32, straight from the layer's formula.

y, dx and d topk_weights of a token depend on that token alone, and the gradients of an expert's weights on its rows
alone. So a few tokens and experts are enough to check an implementation, at sizes where a whole float32 layer would not
fit or take minutes; an implementation that gets any rows or tiles wrong has hardly a way past evenly spread tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.partition import expert_range
from .problem import LEAVES, Problem

#: Tokens that are checked, at most.
TOKENS = 96
#: Relative Frobenius errors that bfloat16 with rounded h, a and o rows stays below, forward and backward.
TOLERANCES = {"y": 1e-2, **dict.fromkeys(LEAVES, 2e-2)}


@dataclass(frozen=True)
class Expected:
    """Float32 rows. tokens, experts: which; values: of y and of `LEAVES`, by name, for those tokens or experts."""

    tokens: Tensor
    experts: Tensor
    values: dict[str, Tensor]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What is compared of a whole result."""
        return whole.detach()[self.experts if name.startswith("w_") else self.tokens].float()


def _gated(rows: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    gate, up = (rows @ w_gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ w_down.T


def _of_tokens(problem: Problem, tokens: Tensor) -> dict[str, Tensor]:
    x = problem.x.detach()[tokens].float().requires_grad_()
    weights = problem.topk_weights.detach()[tokens].float().requires_grad_()
    idx = problem.topk_idx[tokens]
    y = torch.zeros_like(x)
    for expert in idx.unique().tolist():
        if expert < 0:
            continue
        place, slot = (idx == expert).nonzero(as_tuple=True)
        w_gate_up, w_down = (w.detach()[expert].float() for w in (problem.w_gate_up, problem.w_down))
        y = y.index_add(0, place, weights[place, slot, None] * _gated(x[place], w_gate_up, w_down))
    dx, d_weights = torch.autograd.grad(y, (x, weights), problem.dy[tokens].float())
    return {"y": y.detach(), "x": dx, "topk_weights": d_weights}


def _of_expert(problem: Problem, expert: int) -> tuple[Tensor, Tensor]:
    w_gate_up, w_down = (w.detach()[expert].float().requires_grad_() for w in (problem.w_gate_up, problem.w_down))
    place, slot = (problem.topk_idx == expert).nonzero(as_tuple=True)
    if len(place) == 0:
        return torch.zeros_like(w_gate_up), torch.zeros_like(w_down)
    rows = _gated(problem.x.detach()[place].float(), w_gate_up, w_down)
    d_rows = problem.topk_weights.detach()[place, slot, None].float() * problem.dy[place].float()
    d_gate_up, d_down = torch.autograd.grad(rows, (w_gate_up, w_down), d_rows)
    return d_gate_up, d_down


def make_expected(whole: Problem, rank: int = 0, ranks: int = 1) -> Expected:
    """Of a rank's tokens from its first to its last, and of its busiest expert, its idlest and one between.

    Args:
        whole: the problem of all ranks.
        rank, ranks: whose share; indices count from the share's first token and expert.
    """
    mine = torch.arange(whole.tokens, device=whole.device).tensor_split(ranks)[rank]
    spread = torch.linspace(0, len(mine) - 1, min(TOKENS, len(mine)), device=whole.device).long().unique()
    routed = whole.topk_idx[whole.topk_idx >= 0].long()
    owned = expert_range(whole.shape.num_experts, rank, ranks)
    by_rows = routed.bincount(minlength=whole.shape.num_experts)[owned.start : owned.stop].argsort().tolist()
    experts = sorted({by_rows[-1], by_rows[len(by_rows) // 2], by_rows[0]}) if by_rows else []
    values = _of_tokens(whole, mine[spread])
    gradients = [_of_expert(whole, owned.start + expert) for expert in experts]
    for name, of, like in zip(("w_gate_up", "w_down"), (0, 1), (whole.w_gate_up, whole.w_down), strict=True):
        parts = [gradient[of] for gradient in gradients]
        values[name] = torch.stack(parts) if parts else like.detach()[:0].float()
    return Expected(spread, torch.tensor(experts, dtype=torch.long, device=whole.device), values)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, Frobenius norms; the norm of `actual` where nothing is expected."""
    norm = expected.norm(dtype=torch.float64)
    return float((actual - expected).norm(dtype=torch.float64) / (norm if norm > 0 else 1.0))


def check_numbers(expected: Expected, results: dict[str, Tensor]) -> dict[str, float]:
    """Compares whole results, y and gradients by the names of `LEAVES`, with what they should be.

    Returns:
        Their relative errors.

    Raises:
        ValueError: one is too large, or not a number.
    """
    errors = {name: relative_error(expected.part(name, t), expected.values[name]) for name, t in results.items()}
    for name, error in errors.items():
        if not error < TOLERANCES[name]:
            what = name if name == "y" else f"gradient of {name}"
            raise ValueError(f"{what}: expected a relative error below {TOLERANCES[name]:g}, got {error:.2e}")
    return errors
