"""Random plans for the tests of this folder: layers, tilings, schedules and routings, drawn by hypothesis.

Every draw is small enough to be checked row by row and task by task in Python. Routings come as class counts, made
here without the library, or as the ids they are counted from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from moe_megakernel.plan import GradNeeds, PlanConfig, PlanTables, Problem, Schedule, Tiling, make_plan
from moe_megakernel.plan_names import Direction

CLASSES = 64
KINDS = ("uniform", "zipf", "one expert", "few experts", "none")
ALL_NEEDS = [GradNeeds(*(bool(mask >> i & 1) for i in range(7))) for mask in range(128)]


@dataclass(frozen=True)
class Case:
    """A configuration with one batch's routes. class_counts: int32 [W, E, 64]. tokens: int64 [W]."""

    config: PlanConfig
    class_counts: torch.Tensor
    tokens: torch.Tensor

    def plan(self, direction: Direction = Direction.FORWARD, needs: GradNeeds = GradNeeds()) -> PlanTables:  # noqa: B008
        return make_plan(self.config, self.class_counts, self.tokens, direction, needs)

    def with_schedule(self, **changes: int) -> Case:
        return replace(self, config=replace(self.config, schedule=replace(self.config.schedule, **changes)))


def expert_begin(num_experts: int, ranks: int, rank: int) -> int:
    """First expert of a rank: a contiguous split, earlier ranks hold one more."""
    return sum(num_experts // ranks + (r < num_experts % ranks) for r in range(rank))


def local_range(case: Case) -> range:
    """Global ids of the experts of the case's rank."""
    p = case.config.problem
    return range(*(expert_begin(p.num_experts, p.num_ranks, r) for r in (p.rank, p.rank + 1)))


def expert_rows(case: Case) -> list[int]:
    """Rows of each local expert."""
    mine = local_range(case)
    return case.class_counts[:, mine.start : mine.stop].sum((0, 2)).tolist()


def random_ids(random: np.random.Generator, kind: str, tokens: int, top_k: int, num_experts: int) -> np.ndarray:
    """Ids [T, K] with duplicates and dropped routes."""
    shape = (tokens, top_k)
    if kind == "one expert":
        ids = np.full(shape, random.integers(num_experts))
    elif kind == "few experts":
        ids = random.choice(random.integers(0, num_experts, 2), shape)
    elif kind == "none":
        return np.full(shape, -1)
    elif kind == "zipf":
        ids = np.minimum(random.zipf(1.3, shape) - 1, num_experts - 1)
    else:
        ids = random.integers(0, num_experts, shape)
    return np.where(random.random(shape) < 0.05, -1, ids)


def count_classes(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """[E, 64] routes per expert and t mod 64, for ids [T, K]."""
    token = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    valid = ids >= 0
    counts = np.bincount(ids[valid] * CLASSES + token[valid] % CLASSES, minlength=num_experts * CLASSES)
    return counts.reshape(num_experts, CLASSES).astype(np.int32)


def make_case(seed: int, max_ranks: int = 8, max_tokens: int = 1500, max_experts: int = 24) -> Case:
    """A case that `seed` fixes; shapes, tiles, order and routing are all random."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(1, max_ranks + 1))
    num_experts = int(random.integers(1, max_experts + 1))
    top_k = int(random.integers(1, 5))
    tokens = random.integers(0, max_tokens + 1, ranks) * (random.random(ranks) < 0.9)
    kind = "none" if random.random() < 0.03 else str(random.choice(KINDS[:-1]))
    ids = [random_ids(random, kind, int(t), top_k, num_experts) for t in tokens]
    counts = np.stack([count_classes(i, num_experts) for i in ids])
    rows = [
        counts[:, expert_begin(num_experts, ranks, r) : expert_begin(num_experts, ranks, r + 1)].sum()
        for r in range(ranks)
    ]
    tiling = Tiling(
        act_columns=128 * int(random.integers(1, 3)),
        hidden_columns=int(random.choice([32, 64, 100])),
        wgrad_rows=int(random.choice([128, 192])),
        wgrad_columns=int(random.choice([64, 128, 256])),
        piece_rows=int(random.choice([1, 16, 32, 32, 64, 128])),
        combine_tokens=int(random.integers(1, 200)),
    )
    schedule = Schedule(
        num_clusters=int(random.integers(1, 7)),
        waves=int(random.integers(1, 4)),
        segment_tiles=2 * int(random.integers(1, 4)),
        lag=int(random.integers(0, 4)),
        separate_stages=bool(random.random() < 0.15),
        wgrad_tiles=2 * int(random.integers(1, 4)),
    )
    problem = Problem(
        num_ranks=ranks,
        rank=int(np.argmax(rows) if random.random() < 0.7 else random.integers(ranks)),
        num_experts=num_experts,
        top_k=top_k,
        hidden=int(random.integers(1, 400)),
        width=int(random.integers(1, 800)),
        gated=bool(random.random() < 0.7),
        max_tokens=int(max(tokens)),
        row_capacity=int(tokens.sum()) * top_k,
    )
    tiling = replace(tiling, dgrad_columns=128 * int(random.integers(1, 4)))
    return Case(PlanConfig(problem, tiling, schedule), torch.from_numpy(counts), torch.from_numpy(tokens))


def cases(**options: object) -> st.SearchStrategy[Case]:
    """Cases by seed; see `make_case` for the options."""
    return st.integers(0, 2**32 - 1).map(lambda seed: make_case(seed, **options))  # type: ignore[arg-type]
