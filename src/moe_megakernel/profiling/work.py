"""From the events of a trace to pieces of work: when, of which class, which part of the MoE layer, launched when.

On a device a piece is a kernel or a copy, and what stands around it is found through its launch on the host. A trace
without device events is one of a CPU run: there a piece is a stretch of an op's own time, in which it and none of the
ops inside it runs. `analysis.py` works on the pieces and knows of neither.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .reader import Columns, Trace
from .rules import CLASSES, PARTS, Rules

#: Stands for a launch time that the trace does not tell.
UNKNOWN = np.iinfo(np.int64).max
#: Ranges by which c10d's backends show that they are at work; all other ranges only say what users call things.
_BACKEND_RANGE = re.compile(r"(gloo|nccl|mpi|ucc|xccl):")
#: Ops that compute in their own time, whatever they call.
_COMPUTES = re.compile(r"(aten|mkl|mkldnn|onednn|quantized)::")
_STEP = "ProfilerStep#"
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Work:
    """Pieces of work on one device, in order of their start. All arrays have one element a piece, times in nanoseconds.

    Attributes:
        device: its number, None for the CPU.
        start, end: when it ran; never empty.
        launch_start, launch_end: the host call that started it; `UNKNOWN` where the trace does not tell.
        name: number of its name in the trace.
        work_class: index into `CLASSES`.
        part: index into `PARTS`, -1 for none.
        may_wait: whether the piece may be a wait for communication and so hides none. Own time of an op that holds
            other ops, and is none of ATen's: a layer's op that waits for its all-to-all in Python looks like that.
    """

    device: int | None
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    launch_start: NDArray[np.int64]
    launch_end: NDArray[np.int64]
    name: NDArray[np.int64]
    work_class: NDArray[np.int64]
    part: NDArray[np.int64]
    may_wait: NDArray[np.bool_]


def find_work(trace: Trace, rules: Rules) -> list[Work]:
    """The work of every device in the trace, in order of their numbers, or of the CPU where it has none."""
    around = _Around(trace, rules)
    if not len(trace.device):
        return [_cpu_work(trace, around)]
    launches = _Launches(trace)
    device = trace.device["device"]
    return [_device_work(trace, around, launches, number) for number in np.unique(device).tolist()]


def step_ranges(trace: Trace) -> NDArray[np.int64]:
    """[steps, 2]: when the host was in each step that the profiler or a recorder marked, nanoseconds, in order."""
    marks = np.array([name.startswith(_STEP) for name in trace.names], dtype=bool)
    if not len(trace.ranges):
        return np.empty((0, 2), dtype=np.int64)
    chosen = marks[trace.ranges["name"]]
    found = np.stack((trace.ranges["start"][chosen], trace.ranges["end"][chosen]), axis=1)
    found = found[np.argsort(found[:, 0], kind="stable")]
    kept: list[NDArray[np.int64]] = []
    for one in found:  # a step that begins inside another is a second mark of the same
        if not kept or one[0] >= kept[-1][1]:
            kept.append(one)
    return np.array(kept, dtype=np.int64).reshape(-1, 2)


class _Around:
    """What names say of the work inside, as masks: a bit a rule, of any number (`Rules.surroundings`).

    A backward op also says what stands around the op whose gradient it computes, since autograd runs it outside of all
    ranges: those bits are shifted by `bits`, for `classify` to ask them last.
    """

    def __init__(self, trace: Trace, rules: Rules) -> None:
        self._trace, self._rules = trace, rules
        self._names = np.array([rules.surroundings(name) for name in trace.names], dtype=object)
        self.bits = max((int(mask).bit_length() for mask in self._names), default=0)
        self.op_says = self._names[trace.ops["name"]] != 0
        self.range_says = self._names[trace.ranges["name"]] != 0
        self._of_forward: dict[int, int] = {}
        backward, forward = _forward_ops(trace)
        if len(backward):
            found = self.around(trace.ops, np.unique(forward))
            pairs = zip(backward.tolist(), forward.tolist(), strict=True)
            self._of_forward = {one: found[other] for one, other in pairs if other in found}
            self.op_says[list(self._of_forward)] = True

    def mask(self, event: _Event) -> int:
        """What an op or a range says."""
        return int(self._names[event.name]) | self._of_forward.get(event.op, 0) << self.bits

    def around(self, events: Columns, chosen: NDArray[np.int64]) -> dict[int, int]:
        """event -> the or-ed masks of the ops and ranges around its start on its thread, for those that have any."""
        spans = _threads_events(self._trace, self.op_says, self.range_says)
        asked = chosen[np.lexsort((events["start"][chosen], events["thread"][chosen]))]
        found: dict[int, int] = {}
        open_spans: list[tuple[int, int]] = []  # (end, mask) of those around the event on its thread
        on = -1
        ahead = next(spans, None)
        for event, time, thread in _rows(asked, events["start"][asked], events["thread"][asked]):
            if thread != on:
                open_spans, on = [], thread
            while ahead is not None and (ahead.thread, ahead.start) <= (thread, time):
                if ahead.thread == thread:
                    open_spans.append((ahead.end, self.mask(ahead)))
                ahead = next(spans, None)
            open_spans = [span for span in open_spans if span[0] > time]
            if open_spans:
                found[event] = functools.reduce(operator.or_, (mask for _, mask in open_spans))
        return found

    def classify(self, name: str, mask: int) -> tuple[str, str | None]:
        """Class and part of a piece of work. Of the forward only the part is taken, and where nothing else tells it."""
        own, of_forward = mask & ((1 << self.bits) - 1), mask >> self.bits
        work_class, part = self._rules.classify(name, own)
        if part is None and of_forward:
            _, part = self._rules.classify(name, own | of_forward)
        return work_class, part


def _forward_ops(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Backward ops, and the op of each whose gradient it computes: the last one of the same number that had begun.

    Numbers count by thread, and which thread a forward ran on is told in numbers that the trace uses for nothing else;
    of several threads with the same number the last op is taken.
    """
    ops = trace.ops
    numbered = (ops["sequence"] >= 0) & (ops["sequence"] < 1 << 31)
    is_backward = ops["forward_thread"] > 0
    backward, forward = np.flatnonzero(numbered & is_backward), np.flatnonzero(numbered & ~is_backward)
    if not len(backward) or not len(forward):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    starts = np.sort(ops["start"][forward])
    base = len(starts) + 1

    def key(chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        return ops["sequence"][chosen] * base + np.searchsorted(starts, ops["start"][chosen])

    order = np.argsort(key(forward), kind="stable")
    keys = key(forward)[order]
    at = np.searchsorted(keys, key(backward), "left") - 1
    known = (at >= 0) & (keys[at] // base == ops["sequence"][backward])
    return backward[known], forward[order[at[known]]]


class _Launches:
    """Host calls by correlation."""

    def __init__(self, trace: Trace) -> None:
        self._correlation, self._index = np.unique(trace.calls["correlation"], return_index=True)

    def of(self, correlation: NDArray[np.int64]) -> NDArray[np.int64]:
        """The call of each correlation, -1 where there is none."""
        if not len(self._correlation):
            return np.full(len(correlation), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._correlation, correlation), len(self._correlation) - 1)
        return np.where(self._correlation[at] == correlation, self._index[at], -1)


class _Event(NamedTuple):
    """An op or a range on a host thread. op: its number among the trace's ops, -1 for a range."""

    thread: int
    start: int
    end: int
    name: int
    op: int


def _threads_events(trace: Trace, ops: NDArray[np.bool_], ranges: NDArray[np.bool_]) -> Iterator[_Event]:
    """The chosen ops and ranges, thread by thread in order of start, outer ones first."""
    columns = []
    for events, chosen, is_op in ((trace.ops, ops, True), (trace.ranges, ranges, False)):
        kept = np.flatnonzero(chosen)
        taken = [events[column][kept] for column in ("thread", "start", "end", "name")]
        columns.append((*taken, kept if is_op else np.full(len(kept), -1)))
    thread, start, end, name, op = (np.concatenate(pair) for pair in zip(*columns, strict=True))
    order = np.lexsort((-end, start, thread))
    return (_Event(*row) for row in _rows(*(column[order] for column in (thread, start, end, name, op))))


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of Python values, made a block at a time: whole columns of Python integers would take gigabytes."""
    for i in range(0, len(columns[0]), _BLOCK):
        yield from zip(*(column[i : i + _BLOCK].tolist() for column in columns), strict=True)


def _device_work(trace: Trace, around: _Around, launches: _Launches, number: int) -> Work:
    events = trace.device
    chosen = np.flatnonzero((events["device"] == number) & (events["end"] > events["start"]))
    chosen = chosen[np.argsort(events["start"][chosen], kind="stable")]
    call = launches.of(events["correlation"][chosen])
    found = around.around(trace.calls, np.unique(call[call >= 0]))
    masks = [found.get(one, 0) for one in call.tolist()]
    name = events["name"][chosen]
    launch_start, launch_end = (_at(trace.calls, column, call) for column in ("start", "end"))
    classes = _classify(trace, around, name.tolist(), masks)
    times = (events["start"][chosen], events["end"][chosen], launch_start, launch_end)
    return Work(number, *times, name, *classes, np.zeros(len(name), dtype=bool))


def _at(calls: Columns, column: str, call: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(len(call), UNKNOWN, dtype=np.int64)
    found[call >= 0] = calls[column][call[call >= 0]]
    return found


def _classify(
    trace: Trace, around: _Around, names: list[int], masks: list[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    known: dict[tuple[int, int], tuple[int, int]] = {}
    found = []
    for key in zip(names, masks, strict=True):
        if key not in known:
            work_class, part = around.classify(trace.names[key[0]], key[1])
            known[key] = CLASSES.index(work_class), -1 if part is None else PARTS.index(part)
        found.append(known[key])
    columns = np.array(found, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _cpu_work(trace: Trace, around: _Around) -> Work:
    """Every op's own time, on all threads: when it was the innermost one of its thread.

    A range only says what is around; its time belongs to the op around it, or to nobody. Those of c10d's backends are
    work: that is all that a gloo thread shows.
    """
    works = np.array([_BACKEND_RANGE.match(name) is not None for name in trace.names], dtype=bool)
    pieces = _Pieces()
    running: list[tuple[int, int, int, int]] = []  # (end, name or -1, or-ed mask, number), outermost first
    holders = bytearray()  # by number: whether the op holds others
    on = now = -1
    every = np.ones(len(trace.ops), dtype=bool)
    for event in _threads_events(trace, every, works[trace.ranges["name"]] | around.range_says):
        if event.thread != on:
            _run_until(UNKNOWN, now, running, pieces)
            on = event.thread
        _run_until(event.start, now, running, pieces)
        now = event.start
        name, mask, number = running[-1][1:] if running else (-1, 0, -1)
        if event.op >= 0 or works[event.name]:
            if number >= 0:
                holders[number] = 1
            name, number = event.name, len(holders)
            holders.append(0)
        running.append((event.end, name, mask | around.mask(event), number))
    _run_until(UNKNOWN, now, running, pieces)
    return pieces.work(trace, around, holders)


def _run_until(time: int, now: int, running: list[tuple[int, int, int, int]], pieces: _Pieces) -> None:
    """Adds what runs in [now, time) to the pieces, and takes off the stack what has ended by then."""
    while running:
        end, name, mask, number = running[-1]
        stop = min(end, time)
        if stop > now:
            if name >= 0:
                pieces.append(now, stop, name, mask, number)
            now = stop
        if end > time:
            return
        running.pop()


class _Pieces:
    """Stretches of own time, as columns; masks by number, since they are of any size."""

    def __init__(self) -> None:
        self._columns = Columns("mask", "op")
        self._masks: dict[int, int] = {}

    def append(self, start: int, end: int, name: int, mask: int, op: int) -> None:
        self._columns.append(start, end, name, self._masks.setdefault(mask, len(self._masks)), op)

    def work(self, trace: Trace, around: _Around, holders: bytearray) -> Work:
        """The pieces in order of their start. `holders`: by op, whether it holds others."""
        order = np.argsort(self._columns["start"], kind="stable")
        start, end, name, mask = (self._columns[column][order] for column in ("start", "end", "name", "mask"))
        masks = list(self._masks)
        classes = _classify(trace, around, name.tolist(), [masks[i] for i in mask.tolist()])
        unknown = np.full(len(order), UNKNOWN, dtype=np.int64)
        computes = np.array([_COMPUTES.match(one) is not None for one in trace.names], dtype=bool)
        holds = np.frombuffer(holders, dtype=np.bool_)[self._columns["op"][order]] if len(order) else unknown != UNKNOWN
        may_wait = holds & ~computes[name] & (classes[0] == CLASSES.index("other"))
        return Work(None, start, end, unknown, unknown, name, *classes, may_wait)
