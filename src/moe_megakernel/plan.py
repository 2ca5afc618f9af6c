"""Plans, seen from Python: what a layer's launch will do, as tables that C++ builds and that kernels share.

`make_plan` asks `moe::plan_tables` for one rank's plan, `make_layout` for the byte map of its workspace, `edges` for
the dependency table. Everything here is a view of `kernels/include/moe/plan`; nothing is computed twice. Used by the
simulator, the tests and the documentation; needs the native library.

Letters: T tokens on this rank, K top_k, E experts in the group, L experts on this rank, W ranks, H hidden width, I
expert width, R rows that arrive at this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from . import _native
from . import ops as _ops  # noqa: F401  (defines the ops and loads the library)
from .plan_names import Counter, Direction, Fence, Proxy, Region, Role, Scope

#: Rows of a row tile, `kRowTile` in `plan/problem.h`.
ROW_TILE = 128
#: Columns of `PlanTables.waits` and `PlanTables.raises`.
RECORD_COLUMNS = ("stream", "ticket", "block", "role", "counter", "index", "value")


@dataclass(frozen=True)
class Problem:
    """Sizes of one layer, as rank `rank` sees it.

    num_ranks: W. num_experts: E. top_k: K. hidden: H. width: I. gated: w_gate_up has 2I rows, else I. max_tokens:
    largest T of any rank. row_capacity: rows a rank can receive.
    """

    num_ranks: int
    rank: int
    num_experts: int
    top_k: int
    hidden: int
    width: int
    gated: bool
    max_tokens: int
    row_capacity: int


@dataclass(frozen=True)
class Tiling:
    """Extents of tiles and of small tasks.

    act_columns: columns of the activation that a gate_up tile makes, a multiple of 128. hidden_columns: columns of a
    down (and gate_up dgrad) tile. dgrad_columns: columns of the activation's gradient that a down dgrad tile makes, a
    multiple of 128. wgrad_rows, wgrad_columns: of a weight gradient tile. piece_rows: rows that one dispatch ticket
    moves, a divisor of 128. combine_tokens: tokens of one combine ticket.
    """

    act_columns: int = 128
    hidden_columns: int = 256
    dgrad_columns: int = 128
    wgrad_rows: int = 128
    wgrad_columns: int = 256
    piece_rows: int = 32
    combine_tokens: int = 16


@dataclass(frozen=True)
class Schedule:
    """Order of tasks and sizes of rings.

    num_clusters: resident clusters of two blocks that the order is made for. waves: a minibatch has at least this many
    gate_up tasks for each cluster. segment_tiles: row tiles of one expert that are worked on together at most, even.
    wgrad_tiles: the same of one expert's weight gradient. lag: down tasks of minibatch q follow the gate_up tasks of
    minibatch q + lag. x_slots, a_slots: row tiles of the rings, 0 for as many as needed. separate_stages: all gate_up
    tasks before all down tasks.
    """

    num_clusters: int = 66
    waves: int = 2
    segment_tiles: int = 8
    wgrad_tiles: int = 8
    lag: int = 1
    x_slots: int = 0
    a_slots: int = 0
    separate_stages: bool = False


@dataclass(frozen=True)
class PlanConfig:
    """All that a plan depends on but the routes."""

    problem: Problem
    tiling: Tiling = Tiling()
    schedule: Schedule = Schedule()

    def tensor(self) -> Tensor:
        """The fields in order as int64, what the ops take."""
        values = (*astuple(self.problem), *astuple(self.tiling), *astuple(self.schedule))
        return torch.tensor([int(v) for v in values])

    @classmethod
    def from_values(cls, values: Sequence[int]) -> PlanConfig:
        """The inverse of `tensor`.

        Args:
            values: its elements.
        """
        parts: list[Any] = []
        begin = 0
        for kind in (Problem, Tiling, Schedule):
            kinds = get_type_hints(kind)
            own = zip(fields(kind), values[begin : begin + len(fields(kind))], strict=True)
            parts.append(kind(**{field.name: kinds[field.name](value) for field, value in own}))
            begin += len(fields(kind))
        return cls(*parts)

    def for_rank(self, rank: int) -> PlanConfig:
        """The same layer seen from another rank."""
        return replace(self, problem=replace(self.problem, rank=rank))


class GradNeeds(NamedTuple):
    """Gradients that a backward launch computes; the others' tasks are left out.

    recompute: no gradient, but that the forward has not saved h.
    """

    x: bool = True
    topk_weights: bool = True
    w_gate_up: bool = True
    w_down: bool = True
    bias_gate_up: bool = True
    bias_down: bool = True
    recompute: bool = False

    def mask(self) -> int:
        """As bits, first field in bit 0."""
        return sum(1 << i for i, need in enumerate(self) if need)


@dataclass(frozen=True)
class PlanTables:
    """One rank's plan for one launch; every tensor is int64 on CPU.

    expert_offsets: [L + 1], first row of each local expert, then R.
    tiles: [n, 3], each row tile's local expert, first row, rows.
    segments: [n, 4], each segment's local expert, first tile, tiles, minibatch.
    minibatch_ends: [n], one past the last segment of each minibatch.
    expert_tiles, expert_pieces: [L + 1], tiles and filled pieces of all experts before.
    tasks: [n, 5], the compute stream by ticket: `TaskKind`, local expert, tile, column, 1 if the two blocks of the
        cluster take two columns of one row tile and 0 if they take two row tiles of one column.
    pulls: [n, 4], the pull stream by ticket: `TaskKind`, source (0 the op's rows, 1 x in backward), tile or token
        block, piece.
    waits, raises: [n, 7], see `RECORD_COLUMNS`: `Stream`, ticket (-1: before a role's first), block of the cluster,
        `Role`, `Counter`, index into the counter, target or amount. Flags have generation 1; their index is the rank
        awaited, or the rank in whose memory the flag is set.
    ring_minimum: [2], the least slots of the x ring and the a ring with which this plan gets through (forward).
    """

    expert_offsets: Tensor
    tiles: Tensor
    segments: Tensor
    minibatch_ends: Tensor
    expert_tiles: Tensor
    expert_pieces: Tensor
    tasks: Tensor
    pulls: Tensor
    waits: Tensor
    raises: Tensor
    ring_minimum: Tensor


class RegionBytes(NamedTuple):
    """Place of one region: bytes from the start of its memory, and length. Shared memory is mapped by peers."""

    offset: int
    bytes: int
    shared: bool


class Edge(NamedTuple):
    """One edge of the dependency table, see `plan/edges.h`."""

    counter: Counter
    raiser: Role
    waiter: Role
    raiser_proxy: Proxy
    waiter_proxy: Proxy
    overwrites: bool
    crosses_ranks: bool
    scope: Scope
    raiser_fences: Fence
    waiter_fences: Fence


def _require_library() -> None:
    if not _native.load():
        raise RuntimeError(f"plan: native library: expected it loaded, got {_native.why_missing()}")


def make_plan(
    config: PlanConfig,
    class_counts: Tensor,
    tokens: Tensor,
    direction: Direction = Direction.FORWARD,
    needs: GradNeeds = GradNeeds(),  # noqa: B008  (immutable)
) -> PlanTables:
    """Plans one launch of one rank.

    Args:
        config: sizes, tiles, order, and which rank.
        class_counts: int32 [W, E, 64], routes of each rank per expert and t mod 64, as `moe::route` counts them.
        tokens: int64 [W], T of each rank.
        direction: of the launch.
        needs: gradients wanted, read in backward.

    Raises:
        RuntimeError: without the native library; or `moe::plan_tables: argument: expected ..., got ...`.
    """
    _require_library()
    counts = class_counts.to(torch.int32).contiguous()
    tables = torch.ops.moe.plan_tables(
        counts, tokens.long().contiguous(), config.tensor(), int(direction), needs.mask()
    )
    return PlanTables(*tables)


def make_layout(config: PlanConfig, element: int = 2) -> dict[Region, RegionBytes]:
    """The byte map of a rank's workspace, for activations of `element` bytes; slots of 0 hold every routing.

    Raises:
        RuntimeError: without the native library; or `moe::plan_layout: argument: expected ..., got ...`.
    """
    _require_library()
    rows = torch.ops.moe.plan_layout(config.tensor(), element).tolist()
    return {Region(i): RegionBytes(offset, size, bool(shared)) for i, (offset, size, shared) in enumerate(rows)}


def edges() -> list[Edge]:
    """The dependency table, in the header's order.

    Raises:
        RuntimeError: without the native library.
    """
    _require_library()
    kinds = (Counter, Role, Role, Proxy, Proxy, bool, bool, Scope, Fence, Fence)
    rows = torch.ops.moe.plan_edges(torch.empty(0)).tolist()
    return [Edge(*(kind(value) for kind, value in zip(kinds, row, strict=True))) for row in rows]


CONFIG_FIELDS = tuple(field.name for part in (Problem, Tiling, Schedule) for field in fields(part))
