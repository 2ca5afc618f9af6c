"""A rank's plan as the simulation walks it: tasks with their lengths, pulls with their bytes, and counters as events.

Everything about order and dependencies comes from `moe_megakernel.plan` (and so from the headers that kernels include):
which tasks there are, which counters each awaits and raises. This file only re-indexes it. With `wait_for` other than
"tile" a counter covers all row tiles of a minibatch or of the layer, as published designs with coarser counters do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_megakernel.plan import PlanTables
from moe_megakernel.plan_names import Counter, TaskKind
from moe_megakernel.plan_names import Stream as Tickets

from .costs import BIAS_GRADIENTS, WEIGHT_GRADIENTS, Costs

GRADIENTS = (*WEIGHT_GRADIENTS, *BIAS_GRADIENTS)

# Counters that tasks of this rank wait for and raise. The others are flags and totals, which the engine keeps.
_EVENTS = (
    Counter.X_READY,
    Counter.X_READ,
    Counter.A_READY,
    Counter.A_READ,
    Counter.DY_READY,
    Counter.DH_READY,
    Counter.EXPERT_DH,
    Counter.EXPERT_DY,
    Counter.EXPERT_X,
)
_COARSENED = (Counter.X_READY, Counter.A_READY, Counter.DY_READY, Counter.DH_READY)
# Bookkeeping of the launch without work of their own: "done" is raised and awaited by the engine.
_FLAG_TASKS = (int(TaskKind.CLOSE), int(TaskKind.DRAIN))


@dataclass
class Stream:
    """One rank's work in one direction. Events are numbered; lists are by task or by pull."""

    kind: np.ndarray  # [tasks] TaskKind
    minibatch: np.ndarray  # [tasks], -1 for gradients of weights and biases
    main: np.ndarray  # [tasks] seconds of the main loop
    waits: list[tuple[int, ...]]
    raises: list[list[tuple[int, int]]]
    home: list[float]  # bytes that go home when the task is stored
    home_event: list[int]  # the event that lets them go with others, or -1
    home_of_event: dict[int, float]
    pull_bytes: np.ndarray  # [pulls]
    pull_raises: list[list[tuple[int, int]]]
    pull_waits: list[int]  # the ring slot's event, or -1
    targets: np.ndarray  # [events] raises until the event happens
    delays: np.ndarray  # [events] seconds that it takes longer
    counter_of_event: list[int]
    counter_names: tuple[str, ...]
    rows: int
    num_minibatches: int


class _Events:
    """Numbers counters; coarse ones share a number."""

    def __init__(self, minibatch_of_tile: np.ndarray, wait_for: str):
        self.group = {"tile": None, "minibatch": minibatch_of_tile, "layer": np.zeros_like(minibatch_of_tile)}[wait_for]
        self.numbers: dict[tuple[int, int], int] = {}
        self.counter: list[int] = []

    def number(self, counter: int, index: int) -> int:
        key = (counter, index)
        if key not in self.numbers:
            self.numbers[key] = len(self.counter)
            self.counter.append(counter)
        return self.numbers[key]

    def of_records(self, records: np.ndarray) -> np.ndarray:
        """Event numbers of waits or raises, [n, 7]."""
        counter, index = records[:, 4], records[:, 5].copy()
        if self.group is not None:
            coarse = np.isin(counter, _COARSENED)
            index[coarse] = self.group[index[coarse]]
        pairs, inverse = np.unique(np.stack([counter, index], axis=1), axis=0, return_inverse=True)
        return np.array([self.number(int(c), int(i)) for c, i in pairs], dtype=np.int64)[inverse.reshape(-1)]


def make_stream(plan: PlanTables, costs: Costs, wait_for: str, arriving: float) -> Stream:
    """Re-indexes one rank's plan.

    Args:
        plan: from `make_plan`.
        costs: of this direction and GPU.
        wait_for: what a counter of rows covers, "tile", "minibatch" or "layer".
        arriving: rows that really arrive; the plan's others are padding, which is computed but not moved.
    """
    tiles, tasks = plan.tiles.numpy(), plan.tasks.numpy()
    minibatch_of_tile = _minibatch_of_tile(plan)
    kept = ~np.isin(tasks[:, 0], _FLAG_TASKS)
    place = np.cumsum(kept) - 1  # ticket -> index among the kept
    events = _Events(minibatch_of_tile, wait_for)
    waits, raises = _select(plan.waits.numpy()), _select(plan.raises.numpy())
    wait_events, raise_events = events.of_records(waits), events.of_records(raises)
    targets = np.zeros(len(events.counter), dtype=np.int64)
    np.add.at(targets, raise_events, raises[:, 6])

    compute, pull = waits[:, 0] == Tickets.COMPUTE, waits[:, 0] == Tickets.PULL
    task_waits = _split(place[waits[compute, 1]], wait_events[compute], int(kept.sum()))
    ring = dict(zip(waits[pull, 1].tolist(), wait_events[pull].tolist(), strict=True))
    compute, pull = raises[:, 0] == Tickets.COMPUTE, raises[:, 0] == Tickets.PULL
    task_raises = _sum(place[raises[compute, 1]], raise_events[compute], raises[compute, 6], int(kept.sum()))
    pull_raises = _sum(raises[pull, 1], raise_events[pull], raises[pull, 6], len(plan.pulls))

    tasks = tasks[kept]
    numbers = _TaskNumbers(plan, tasks, minibatch_of_tile)
    real = arriving / max(1, int(plan.expert_offsets[-1]))
    home = costs.home_bytes(tasks[:, 0], numbers.rows) * real
    stream = Stream(
        kind=tasks[:, 0],
        minibatch=numbers.minibatch,
        main=costs.main_loops(tasks[:, 0], tasks[:, 4], numbers.expert_rows, numbers.sharing, numbers.beside),
        waits=[tuple(dict.fromkeys(w)) for w in task_waits],
        raises=task_raises,
        home=home.tolist(),
        home_event=[-1] * len(tasks),
        home_of_event={},
        **_pulls(plan, tiles, ring, pull_raises, costs.row_bytes * real),
        targets=targets,
        delays=np.zeros(len(targets)),
        counter_of_event=events.counter,
        counter_names=tuple(counter.name.lower() for counter in Counter),
        rows=int(arriving),
        num_minibatches=len(plan.minibatch_ends),
    )
    if wait_for != "tile":
        _gather_home(stream, home, wait_for)
    return stream


def _select(records: np.ndarray) -> np.ndarray:
    return records[np.isin(records[:, 4], _EVENTS) & (records[:, 1] >= 0)]


def _split(tickets: np.ndarray, events: np.ndarray, count: int) -> list[list[int]]:
    """Events of each ticket, in the records' order."""
    out: list[list[int]] = [[] for _ in range(count)]
    for ticket, event in zip(tickets.tolist(), events.tolist(), strict=True):
        out[ticket].append(event)
    return out


def _sum(tickets: np.ndarray, events: np.ndarray, amounts: np.ndarray, count: int) -> list[list[tuple[int, int]]]:
    """(event, amount) of each ticket, the blocks' raises added up."""
    out: list[dict[int, int]] = [{} for _ in range(count)]
    for ticket, event, amount in zip(tickets.tolist(), events.tolist(), amounts.tolist(), strict=True):
        out[ticket][event] = out[ticket].get(event, 0) + amount
    return [list(raised.items()) for raised in out]


def _minibatch_of_tile(plan: PlanTables) -> np.ndarray:
    out = np.zeros(len(plan.tiles), dtype=np.int64)
    for _, begin, count, minibatch in plan.segments.tolist():
        out[begin : begin + count] = minibatch
    return out


class _TaskNumbers:
    """What the cost model asks about each task."""

    def __init__(self, plan: PlanTables, tasks: np.ndarray, minibatch_of_tile: np.ndarray):
        rows_of_tile = np.append(plan.tiles[:, 2].numpy(), 0)  # one more, for the second block of no tile
        kind, expert, tile, paired = tasks[:, 0], tasks[:, 1], tasks[:, 2], tasks[:, 4]
        of_expert = np.isin(kind, GRADIENTS)  # of weights and biases: no row tile of their own
        own = np.where(of_expert, len(rows_of_tile) - 1, tile)
        alone = of_expert | (kind == TaskKind.ROUTE_GRAD)
        second = np.where(alone, len(rows_of_tile) - 1, np.where(paired == 1, tile, tile + 1))
        second = np.minimum(second, len(rows_of_tile) - 1)
        self.rows = rows_of_tile[own] + rows_of_tile[second]
        per_expert = np.diff(plan.expert_offsets.numpy())
        self.expert_rows = per_expert[expert]
        minibatches = np.append(minibatch_of_tile, -1)
        self.minibatch = minibatches[own]
        phase = (self.minibatch + 1) * len(TaskKind) + kind
        self.beside = np.bincount(phase, minlength=1)[phase] if len(phase) else np.zeros(0)
        # Row tiles of the same expert in the same minibatch: they use a weight tile one after the other.
        width = len(per_expert) + 1
        key_of_tile = minibatch_of_tile * width + plan.tiles[:, 0].numpy()
        count = np.bincount(key_of_tile, minlength=int(key_of_tile.max(initial=0)) + 1) if len(key_of_tile) else [0]
        key = np.where(of_expert, 0, self.minibatch * width + expert)
        self.sharing = np.where(of_expert, 1, np.asarray(count)[np.minimum(key, len(count) - 1)])


def _pulls(
    plan: PlanTables,
    tiles: np.ndarray,
    ring: dict[int, int],
    raises: list[list[tuple[int, int]]],
    row_bytes: float,
) -> dict:
    """Pieces of one row tile are pulled together: they come from all ranks at once."""
    pulls = plan.pulls.numpy()
    pulls = pulls[pulls[:, 0] == TaskKind.DISPATCH]
    bytes_: list[float] = []
    together: list[list[tuple[int, int]]] = []
    waits: list[int] = []
    last = (-1, -1)
    for ticket, (_, source, tile, _) in enumerate(pulls.tolist()):
        if (source, tile) != last:
            last = (source, tile)
            bytes_.append(float(tiles[tile, 2]) * row_bytes)
            together.append([])
            waits.append(ring.get(ticket, -1))
        together[-1].extend(raises[ticket])
    return {"pull_bytes": np.array(bytes_), "pull_raises": together, "pull_waits": waits}


def _gather_home(stream: Stream, home: np.ndarray, wait_for: str) -> None:
    """Lets rows go home when a whole minibatch (or the layer) is computed."""
    group = np.where(home > 0, np.zeros_like(stream.minibatch) if wait_for == "layer" else stream.minibatch, -1)
    for index in np.unique(group[group >= 0]).tolist():
        event = len(stream.targets)
        members = np.flatnonzero(group == index)
        stream.targets = np.append(stream.targets, len(members))
        stream.delays = np.append(stream.delays, 0.0)
        stream.counter_of_event.append(int(Counter.STORED))
        stream.home_of_event[event] = float(home[members].sum())
        for task in members.tolist():
            stream.home_event[task] = event
