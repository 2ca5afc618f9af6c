"""Loads libmoe_proof, the model checker of the plan, and calls its ops.

Built beside the package's library and never installed. The ops' schemas are here because only tests use them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_megakernel import _native
from moe_megakernel.plan import PlanConfig

NAME = "libmoe_proof.so"
ROOT = Path(__file__).resolve().parents[2]
SCHEDULERS = ("uniform", "priorities", "roles", "starve_agent", "starve_rank")
LOG_FIELDS = ("block", "role", "event", "task", "counter", "index", "value", "time")

SCHEMAS = (
    "explore(Tensor config, Tensor options, int seed, int launches, int max_steps, str scheduler, str fault) -> Tensor",
    "explore_log(Tensor config, Tensor options, int seed, int launches, str scheduler, int launch, int rank) "
    "-> (Tensor records, Tensor config, Tensor launch, Tensor expert_offsets)",
    "explore_faults(Tensor like) -> str",
    "check_log(Tensor records, Tensor config, Tensor launch, Tensor expert_offsets, int num_blocks, int num_combiners) "
    "-> str",
)
_fragment = torch.library.Library("moe", "FRAGMENT")


@dataclass(frozen=True)
class Options:
    """`ExploreOptions` of kernels/proof/launches.h.

    clusters: C. load_ahead: tasks that load may be ahead. pull_batch: pieces in flight. x_spare, a_spare: slots above
    the minimum. directions: 0 drawn, 1 forward, 2 backward, 3 in turns. needs: mask, routing: 0 uniform, 1 Zipf, 2 one
    expert, 3 all dropped, 4 some dropped, tokens: 0 full, 1 different, 2 some ranks empty, 3 all empty; -1 drawn.
    """

    clusters: int = 2
    load_ahead: int = 1
    pull_batch: int = 2
    x_spare: int = 0
    a_spare: int = 0
    directions: int = 0
    needs: int = -1
    routing: int = -1
    tokens: int = -1

    def tensor(self) -> Tensor:
        return torch.tensor(astuple(self))


class Stats(NamedTuple):
    """What a run counted; `launches` over all ranks, `accesses` to memory that were checked."""

    steps: int
    launches: int
    tasks: int
    pieces: int
    combines: int
    accesses: int
    row_tiles: int
    x_slots: int
    a_slots: int
    x_reuses: int
    a_reuses: int


class Log(NamedTuple):
    """One rank's records of one launch, int64 [N, 8], and the plan that they belong to."""

    records: Tensor
    config: Tensor
    launch: Tensor
    expert_offsets: Tensor


@cache
def load() -> None:
    """Define the ops and load the library; an error where it has not been built."""
    found = _native.library_path() if _native.load() else None
    candidates = [*([found.with_name(NAME)] if found else []), ROOT / "build" / NAME]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise RuntimeError(f"{NAME}: expected it built, got none of " + ", ".join(map(str, candidates)))
    for schema in SCHEMAS:
        _fragment.define(schema)
    torch.ops.load_library(str(path))


def explore(
    config: PlanConfig,
    options: Options,
    seed: int,
    launches: int = 3,
    scheduler: str = "mixed",
    fault: str = "none",
    max_steps: int = 1_000_000,
) -> Stats:
    """Run one interleaving; a RuntimeError says what was violated."""
    load()
    stats = torch.ops.moe.explore(config.tensor(), options.tensor(), seed, launches, max_steps, scheduler, fault)
    return Stats(*stats.tolist())


def explore_log(
    config: PlanConfig, options: Options, seed: int, launches: int, launch: int, rank: int, scheduler: str = "mixed"
) -> Log:
    load()
    arguments = (config.tensor(), options.tensor(), seed, launches, scheduler, launch, rank)
    return Log(*torch.ops.moe.explore_log(*arguments))


def check_log(log: Log, num_blocks: int, num_combiners: int = 0) -> str:
    """Why the log is rejected, or an empty string; further combining agents have numbers from `num_blocks` on."""
    load()
    return torch.ops.moe.check_log(*log, num_blocks, num_combiners)


def table_faults() -> list[str]:
    """Every fault that leaves out one raise, wait or fence of the dependency table."""
    load()
    return torch.ops.moe.explore_faults(torch.empty(0)).split()
