"""Cases for the explorer: layers of up to eight ranks, small enough that a run takes milliseconds, with every tiling
and order that the plan knows. Row tiles have 128 rows, so it takes a few thousand rows to fill rings more than once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.proof.library import Options

from moe_megakernel.plan import PlanConfig, Problem, Schedule, Tiling


@dataclass(frozen=True)
class Case:
    config: PlanConfig
    options: Options

    def with_options(self, **changes: int) -> Case:
        return replace(self, options=replace(self.options, **changes))


def problem(ranks: int, experts: int, top_k: int, max_tokens: int, hidden: int, width: int, gated: bool) -> Problem:
    """A layer whose capacity every routing fits."""
    capacity = ranks * max_tokens * top_k
    return Problem(ranks, 0, experts, top_k, hidden, width, gated, max_tokens, capacity)


def draw_case(seed: int) -> Case:
    """W 1 to 8, C 1 to 4, rings from their minimum on, lag 0 to 2, all else at random."""
    r = random.Random(seed)
    ranks, top_k, rows = r.randint(1, 8), r.randint(1, 4), r.randint(256, 3500)
    layer = problem(
        ranks=ranks,
        experts=r.randint(1, 12),
        top_k=top_k,
        max_tokens=max(1, rows // (ranks * top_k)),
        hidden=r.choice([64, 100, 128, 256]),
        width=r.choice([100, 128, 256, 500]),
        gated=r.random() < 0.7,
    )
    tiling = Tiling(
        act_columns=r.choice([128, 128, 256]),
        hidden_columns=r.choice([64, 128]),
        dgrad_columns=r.choice([128, 256, 256]),
        wgrad_rows=r.choice([64, 128]),
        wgrad_columns=128,
        piece_rows=r.choice([32, 64, 128]),
        combine_tokens=r.choice([8, 16, 64]),
    )
    schedule = Schedule(
        num_clusters=r.randint(1, 4),
        waves=r.randint(1, 3),
        segment_tiles=r.choice([2, 4, 6]),
        lag=r.randint(0, 2),
        separate_stages=r.random() < 0.1,
        wgrad_tiles=r.choice([2, 4, 6]),
    )
    options = Options(
        clusters=r.randint(1, 4),
        load_ahead=r.randint(0, 3),
        pull_batch=r.randint(1, 4),
        x_spare=r.choice([0, 0, 1, 2]),
        a_spare=r.choice([0, 0, 1, 2]),
    )
    return Case(PlanConfig(layer, tiling, schedule), options)


def busy_case(ranks: int = 4, clusters: int = 2) -> Case:
    """A case in which every edge of the table is used: rings that turn over, forward and backward, all gradients."""
    layer = problem(ranks, experts=2 * ranks, top_k=2, max_tokens=300, hidden=128, width=256, gated=True)
    tiling = Tiling(hidden_columns=64, wgrad_columns=128, piece_rows=64, combine_tokens=32)
    schedule = Schedule(num_clusters=1, waves=2, segment_tiles=4, wgrad_tiles=4, lag=1)
    return Case(PlanConfig(layer, tiling, schedule), Options(clusters=clusters, directions=3, needs=63))
