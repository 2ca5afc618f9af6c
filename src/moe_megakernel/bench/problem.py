"""One layer in memory, with everything that an implementation of it gets: inputs, weights, routes and dy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.partition import expert_range
from ..shapes import Shape
from .routings import Routing, make_routes

#: The tensors that gradients are asked for, in the order in which they are given back.
LEAVES = ("x", "topk_weights", "w_gate_up", "w_down")


@dataclass(frozen=True)
class Problem:
    """x [T, H], topk_idx int32 [T, K], topk_weights fp32 [T, K], w_gate_up [E, 2I, H], w_down [E, H, I], dy [T, H].

    T tokens of this rank, and of weights those of its experts. Values are of order 1. Floating-point tensors but the
    routing weights are bfloat16; those of `LEAVES` ask for gradients.
    """

    shape: Shape  # with its number of tokens
    routing: Routing
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    dy: Tensor
    group: dist.ProcessGroup | None = None  # of the ranks that the batch and the experts are split over
    most_tokens: int = 0  # of any rank
    most_rows: int = 0  # that any rank receives

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def experts_of(self, rank: int) -> range:
        """The experts whose weights that rank has."""
        return expert_range(self.shape.num_experts, rank, self.ranks)

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in LEAVES)

    @property
    def routes(self) -> int:
        """Routes that are not dropped (-1)."""
        return int((self.topk_idx >= 0).sum())


def make_problem(
    shape: Shape, routing: Routing, tokens: int | None = None, device: str | torch.device = "cuda", seed: int = 0
) -> Problem:
    """Made on the device from `seed`.

    Args:
        shape: sizes; only gated ones, activated by silu.
        tokens: T, by default the shape's own.

    Raises:
        ValueError: nobody says how many tokens, the shape has no gate, or the routing is a file that does not fit.
    """
    count = shape.tokens if tokens is None else tokens
    if count is None or count < 1:
        raise ValueError(f"bench: tokens: expected at least 1 for shape {shape.slug}, got {count}")
    if not shape.gated:
        raise ValueError(f"bench: shape: expected a gated layer, got {shape.slug}")
    generator = torch.Generator(device).manual_seed(seed)
    idx, weights = make_routes(routing, shape, count, generator)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    return Problem(
        replace(shape, tokens=count),
        routing,
        normal(count, shape.hidden).requires_grad_(),
        idx,
        weights.requires_grad_(),
        normal(shape.num_experts, 2 * shape.width, shape.hidden).mul_(shape.hidden**-0.5).requires_grad_(),
        normal(shape.num_experts, shape.hidden, shape.width).mul_(shape.width**-0.5).requires_grad_(),
        normal(count, shape.hidden),
        most_tokens=count,
    )


def rows_of_busiest(topk_idx: Tensor, num_experts: int, ranks: int) -> int:
    """Rows that the rank receives which receives most; [T, K] of all ranks."""
    counts = topk_idx[topk_idx >= 0].long().bincount(minlength=num_experts).tolist()
    owned = (expert_range(num_experts, rank, ranks) for rank in range(ranks))
    return max(sum(counts[experts.start : experts.stop]) for experts in owned)


def share_of(problem: Problem, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> Problem:
    """Copies of the tokens and experts of one rank, of a problem that is whole. `shape` stays that of the whole.

    Args:
        group: of all ranks, for implementations that talk.
    """
    experts = expert_range(problem.shape.num_experts, rank, ranks)

    def tokens(tensor: Tensor) -> Tensor:
        part = tensor.detach().tensor_split(ranks)[rank].clone()
        return part.requires_grad_(tensor.requires_grad)

    def weights(tensor: Tensor) -> Tensor:
        return tensor.detach()[experts.start : experts.stop].clone().requires_grad_()

    return replace(
        problem,
        x=tokens(problem.x),
        topk_idx=tokens(problem.topk_idx),
        topk_weights=tokens(problem.topk_weights),
        w_gate_up=weights(problem.w_gate_up),
        w_down=weights(problem.w_down),
        dy=tokens(problem.dy),
        group=group,
        most_tokens=-(-problem.tokens // ranks),
        most_rows=rows_of_busiest(problem.topk_idx, problem.shape.num_experts, ranks),
    )
