"""Runs all ranks of a group through one layer: the clock, the links between ranks, and the flags at its ends.

Time moves in steps of about a thousandth of the layer. In each step links are shared among what every rank pulls and
sends home (`links`), arrived tiles raise their counters at the time within the step at which their last byte came, and
every rank's clusters claim tasks (`rank`). Task times are exact; only what feeds back from tasks to links, free ring
slots and rows to send home, waits for the next step. Called by `simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop

import numpy as np

from moe_megakernel.hardware import Hardware

from .costs import Costs
from .links import fair_rates, stream_usage
from .rank import Rank
from .stream import Stream

_CRUMB = 1.0  # bytes; less is rounding


@dataclass(frozen=True)
class Timing:
    """How the layer starts, who copies, and what lies between its parts. Times in seconds, rates in bytes a second."""

    start: float  # the first pull
    engine_rate: float  # a rank's pulling warps or copying SMs together
    engine_sends: bool  # they send rows home, too; else computing warps store them
    spare_warps: bool  # pulling slows the main loop down
    push: bool  # rows are pushed to experts
    arrival: float  # from a tile's last byte until its counter is seen
    close: float  # from the last byte home until every rank sees "done"
    combine: float  # seconds
    combine_beside: bool  # the combine runs beside the last tasks (weight gradients)
    end: float  # after the combine


@dataclass
class Run:
    """What happened. `egress` and `ingress` are wire bytes of each rank in each step."""

    ranks: list[Rank]
    start: float
    step: float
    ends: np.ndarray  # [W] seconds
    dispatch_end: np.ndarray  # [W]
    home_end: np.ndarray  # [W]
    combine_start: float
    egress: np.ndarray  # [steps, W]
    ingress: np.ndarray  # [steps, W]


@dataclass
class _Wires:
    """The links, and what has gone over them: towards experts (`sent`) and home."""

    usage: np.ndarray
    capacity: np.ndarray
    sent: np.ndarray  # [W] bytes, by the rank that copies
    home: np.ndarray  # [W] bytes, by the rank that computed them
    queue: np.ndarray  # [W] bytes ready to go home
    egress: list[np.ndarray] = field(default_factory=list)
    ingress: list[np.ndarray] = field(default_factory=list)

    def move(self, rates: np.ndarray, step: float) -> None:
        count = len(self.sent)
        self.sent += rates[:count] * step
        self.home += rates[count:] * step
        self.queue = np.maximum(self.queue - rates[count:] * step, 0.0)
        load = self.usage @ rates * step
        self.egress.append(load[:count])
        self.ingress.append(load[count : 2 * count])


class _Arrivals:
    """Row tiles of one rank on their way: which are allowed to come, and which have come."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.ends = np.cumsum(stream.pull_bytes)
        self.allowed = 0  # tiles whose ring slot is free
        self.next = 0  # the first that is not complete
        self.got = 0.0  # bytes
        self.end = 0.0  # when the last came

    @property
    def done(self) -> bool:
        return self.next == len(self.ends)

    def room(self, rank: Rank, now: float) -> float:
        """Bytes that may be pulled now."""
        waits = self.stream.pull_waits
        while self.allowed < len(self.ends) and (waits[self.allowed] < 0 or rank.happened(waits[self.allowed], now)):
            self.allowed += 1
        return float(self.ends[self.allowed - 1]) - self.got if self.allowed else 0.0

    def deliver(self, rank: Rank, got: float, now: float, step: float, latency: float) -> None:
        """Takes what has come until now + step, and raises the counters of complete tiles."""
        before, moved = self.got, got - self.got
        self.got = got
        while self.next < len(self.ends) and self.ends[self.next] < got + 2 * _CRUMB:
            share = 1.0 if moved <= 0 else min(max((self.ends[self.next] - before) / moved, 0.0), 1.0)
            self.end = now + share * step + latency
            for event, amount in self.stream.pull_raises[self.next]:
                rank.raise_event(event, amount, self.end)
            self.next += 1
        if self.done:
            rank.pulling = False


def run_layer(
    streams: list[Stream], rows: np.ndarray, costs: Costs, hardware: Hardware, timing: Timing, step: float, record: bool
) -> Run:
    """Simulates one direction of one layer.

    Args:
        streams: of each rank.
        rows: [W, W] rows from each rank (first index) to each rank's experts.
        costs, hardware, timing: see there.
        step: seconds.
        record: keep the spans of all tasks.
    """
    count = len(streams)
    ranks = [Rank(stream, costs, timing.start, timing.spare_warps, record) for stream in streams]
    arrivals = [_Arrivals(stream) for stream in streams]
    pull_total = np.array([stream.pull_bytes.sum() for stream in streams])
    home_total = np.array([sum(stream.home) for stream in streams])
    row_bytes = pull_total.sum() / max(1.0, rows.sum())  # of all that is pulled for a row
    push_total = rows.sum(axis=1) * row_bytes
    wires = _make_wires(rows, hardware, timing)
    home_end = np.full(count, np.nan)
    now = timing.start
    while np.isnan(home_end).any() or not all(a.done for a in arrivals):
        _collect_home(ranks, wires, now)
        room = np.array([a.room(rank, now) for a, rank in zip(arrivals, ranks, strict=True)])
        wanted = push_total - wires.sent if timing.push else room
        demand = np.concatenate([np.minimum(wanted / step, timing.engine_rate), wires.queue / step])
        wires.move(fair_rates(wires.usage, wires.capacity, np.where(demand * step < _CRUMB, 0.0, demand)), step)
        got = _shares(rows).T @ wires.sent if timing.push else wires.sent
        for r, rank in enumerate(ranks):
            arrivals[r].deliver(rank, float(got[r]), now, step, timing.arrival)
            rank.advance(now + step)
            if np.isnan(home_end[r]) and rank.done and home_total[r] - wires.home[r] < 2 * _CRUMB:
                home_end[r] = now + step if home_total[r] > 0 else rank.end
        now += step
    return _finish(ranks, arrivals, home_end, wires, timing, step)


def _shares(rows: np.ndarray) -> np.ndarray:
    """[W, W] rows of the matrix as shares that sum to 1, or to 0 where there are none."""
    total = rows.sum(axis=1, keepdims=True)
    return np.divide(rows, total, out=np.zeros(rows.shape), where=total > 0)


def _make_wires(rows: np.ndarray, hardware: Hardware, timing: Timing) -> _Wires:
    count = len(rows)
    pull, push = 1.0 / hardware.pull_achievable, 1.0 / hardware.push_achievable
    from_home = _shares(rows.T)  # of each expert rank, by home rank
    there = stream_usage(_shares(rows), push, reading=False) if timing.push else stream_usage(from_home, pull, True)
    back = stream_usage(from_home, push, reading=False)
    if not timing.engine_sends:
        back[2 * count :] = 0.0
    capacity = np.concatenate([np.full(2 * count, hardware.link_bandwidth), np.full(count, timing.engine_rate)])
    zeros = np.zeros(count)
    return _Wires(np.concatenate([there, back], axis=1), capacity, zeros.copy(), zeros.copy(), zeros.copy())


def _collect_home(ranks: list[Rank], wires: _Wires, now: float) -> None:
    for r, rank in enumerate(ranks):
        while rank.home and rank.home[0][0] <= now:
            wires.queue[r] += heappop(rank.home)[1]


def _finish(
    ranks: list[Rank], arrivals: list[_Arrivals], home_end: np.ndarray, wires: _Wires, timing: Timing, step: float
) -> Run:
    combine_start = float(home_end.max()) + timing.close
    computed = np.array([rank.end for rank in ranks])
    combined = np.full(len(ranks), combine_start + timing.combine)
    ends = np.maximum(combined, computed) if timing.combine_beside else combined
    return Run(
        ranks=ranks,
        start=timing.start,
        step=step,
        ends=ends + timing.end,
        dispatch_end=np.array([a.end for a in arrivals]),
        home_end=home_end,
        combine_start=combine_start,
        egress=np.array(wires.egress),
        ingress=np.array(wires.ingress),
    )
