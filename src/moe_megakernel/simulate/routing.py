"""How many rows every rank sends to every expert: the simulated routing. Called by `engine` for the row counts that the
plan is made from.

Only counts matter to the plan's sizes and to the links, so no token is drawn: every expert has a probability of being
among a token's K, and each rank's count is a binomial draw. Uniform routing has the noise of real batches.
"""

from __future__ import annotations

import numpy as np

from .options import SimulateError


def parse_routing(routing: str) -> float:
    """The Zipf exponent of a routing: "uniform" is 0, "zipf:1.0" is 1."""
    if routing == "uniform":
        return 0.0
    kind, _, exponent = routing.partition(":")
    try:
        value = float(exponent)
    except ValueError:
        value = -1.0
    if kind != "zipf" or not 0.0 <= value <= 10.0:
        raise SimulateError("routing", "uniform or zipf:S with S between 0 and 10", repr(routing))
    return value


def expert_probabilities(num_experts: int, top_k: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """[E] probability that a token goes to an expert. Sums to top_k, at most 1 each.

    Popularity falls as 1 / place^exponent over a random order of the experts; what exceeds 1 is spread over the rest.
    """
    weight = 1.0 / np.arange(1, num_experts + 1) ** exponent
    probability = np.zeros(num_experts)
    open_ = np.ones(num_experts, dtype=bool)
    while True:
        left = top_k - (~open_).sum()
        probability[open_] = weight[open_] / weight[open_].sum() * left
        over = open_ & (probability > 1.0)
        if not over.any():
            break
        probability[over] = 1.0
        open_ &= ~over
    return probability[rng.permutation(num_experts)]


def draw_counts(
    num_experts: int, top_k: int, ranks: int, tokens: int, routing: str, seed: int, exact: bool = False
) -> np.ndarray:
    """[W, E] int64 routes from each rank to each expert; every rank's sum is tokens * top_k.

    Args:
        exact: no noise: expected counts, rounded so that the sums hold.
    """
    rng = np.random.default_rng(seed)
    probability = expert_probabilities(num_experts, top_k, parse_routing(routing), rng)
    if exact:
        counts = np.tile(np.floor(tokens * probability).astype(np.int64), (ranks, 1))
    else:
        counts = rng.binomial(tokens, np.clip(probability, 0.0, 1.0), size=(ranks, num_experts)).astype(np.int64)
    for rank, row in enumerate(counts):
        _settle(row, tokens, tokens * top_k, rank, rng)
    return counts


def _settle(row: np.ndarray, most: int, total: int, rank: int, rng: np.random.Generator) -> None:
    """Adds or takes single routes at random experts (in turn, from a place that depends on the rank) until they sum."""
    experts = len(row)
    order = np.roll(rng.permutation(experts), rank)
    step = 1 if row.sum() < total else -1
    place = 0
    while row.sum() != total:
        expert = order[place % experts]
        place += 1
        if 0 <= row[expert] + step <= most:
            row[expert] += step
