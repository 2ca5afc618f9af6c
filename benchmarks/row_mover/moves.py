"""Which rows travel where: routes of all ranks, the order of every rank's rows, and the moves of either direction.

Pure functions of a seed, so every rank computes what all of them do. Rows lie as the layer orders them: by expert, then
by (g mod 64, g div 64, k) with g the number of the token over all ranks, so that sources are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_megakernel.distributed.partition import expert_range
from moe_megakernel.testing import random_routing

ROUTINGS = ("uniform", "zipf")
DIRECTIONS = ("pull", "push")


@dataclass(frozen=True)
class Traffic:
    """Moves are int32 [n, 2]: the rank of the far row and its number there.

    pull: by rank, one move for each row of its buffer, in order: from which token of which rank it comes. push: by
    rank, one move for each route t * K + k: to which row of which rank it goes.
    """

    top_k: int
    pull: tuple[Tensor, ...]
    push: tuple[Tensor, ...]

    @property
    def received(self) -> list[int]:
        """Rows of every rank's buffer."""
        return [len(moves) for moves in self.pull]

    def moves(self, direction: str, rank: int) -> Tensor:
        return (self.pull if direction == "pull" else self.push)[rank]

    def moves_of_near_row(self, direction: str) -> int:
        """Move i of a rank concerns its own row i divided by this."""
        return 1 if direction == "pull" else self.top_k

    def remote_share(self) -> float:
        """Of all rows, those that come from another rank."""
        remote = sum(int((moves[:, 0] != rank).sum()) for rank, moves in enumerate(self.pull))
        return remote / max(1, sum(self.received))


def make_routes(ranks: int, tokens: int, num_experts: int, top_k: int, routing: str, seed: int = 0) -> Tensor:
    """int64 [W, T, K] of expert ids; "zipf" prefers expert e with a probability proportional to 1 / (e + 1).

    Raises:
        ValueError: an unknown routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"make_routes: routing: expected one of {', '.join(ROUTINGS)}, got {routing!r}")
    zipf = 1.0 if routing == "zipf" else 0.0
    return random_routing(ranks * tokens, num_experts, top_k, zipf=zipf, seed=seed).view(ranks, tokens, top_k)


def make_traffic(topk_idx_WTK: Tensor, num_experts: int) -> Traffic:
    """The moves of all ranks; no route may be dropped."""
    ranks, tokens, top_k = topk_idx_WTK.shape
    experts = topk_idx_WTK.flatten()
    number = torch.arange(experts.numel())
    token = number // top_k
    key = ((experts * 64 + token % 64) * (ranks * tokens) + token // 64) * top_k + number % top_k
    order = key.argsort()  # of all rows, ranks one after the other
    counts = experts.bincount(minlength=num_experts)
    owned = [expert_range(num_experts, rank, ranks) for rank in range(ranks)]
    received = torch.tensor([int(counts[range_.start : range_.stop].sum()) for range_ in owned])
    owner = torch.arange(ranks).repeat_interleave(received)
    place = number - (received.cumsum(0) - received)[owner]

    from_token = token[order]
    sources = torch.stack((from_token // tokens, from_token % tokens), 1).int()
    targets = torch.empty(experts.numel(), 2, dtype=torch.int32)
    targets[order] = torch.stack((owner, place), 1).int()
    return Traffic(top_k, sources.split(received.tolist()), targets.split(tokens * top_k))
