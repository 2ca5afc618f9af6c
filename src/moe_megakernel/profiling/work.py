"""From the events of a trace to pieces of work: when, of which class, which part of the MoE layer, launched when.

On a device a piece is a kernel or a copy, and what stands around it is found through its launch on the host. A trace
without device events is one of a CPU run: there a piece is a stretch of an op's own time, in which it and none of the
ops inside it runs. `analysis.py` works on the pieces and knows of neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .reader import Columns, Trace
from .rules import CLASSES, PARTS, Rules
from .surroundings import NOTHING, Said, Surroundings, threads_events

#: Stands for a launch time that the trace does not tell.
UNKNOWN = np.iinfo(np.int64).max
#: Ranges by which c10d's backends show that they are at work; all other ranges only say what users call things.
_BACKEND_RANGE = re.compile(r"(gloo|nccl|mpi|ucc|xccl):")
#: Ops that compute in their own time, whatever they call.
_COMPUTES = re.compile(r"(aten|mkl|mkldnn|onednn|quantized)::")
_STEP = "ProfilerStep#"
#: An op or range that runs on a CPU: its end, the name its time goes to (-1: none), what is said inside, its number.
_Running = tuple[int, int, Said, int]


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
    around = Surroundings(trace, rules)
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


def _device_work(trace: Trace, around: Surroundings, launches: _Launches, number: int) -> Work:
    events = trace.device
    chosen = np.flatnonzero((events["device"] == number) & (events["end"] > events["start"]))
    chosen = chosen[np.argsort(events["start"][chosen], kind="stable")]
    call = launches.of(events["correlation"][chosen])
    found = around.around(trace.calls, np.unique(call[call >= 0]))
    said = [found.get(one, NOTHING) for one in call.tolist()]
    name = events["name"][chosen]
    launch_start, launch_end = (_at(trace.calls, column, call) for column in ("start", "end"))
    classes = _classify(trace, around, name.tolist(), said)
    times = (events["start"][chosen], events["end"][chosen], launch_start, launch_end)
    return Work(number, *times, name, *classes, np.zeros(len(name), dtype=bool))


def _at(calls: Columns, column: str, call: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full(len(call), UNKNOWN, dtype=np.int64)
    found[call >= 0] = calls[column][call[call >= 0]]
    return found


def _classify(
    trace: Trace, around: Surroundings, names: list[int], said: list[Said]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    known: dict[tuple[int, Said], tuple[int, int]] = {}
    found = []
    for key in zip(names, said, strict=True):
        if key not in known:
            work_class, part = around.classify(trace.names[key[0]], key[1])
            known[key] = CLASSES.index(work_class), -1 if part is None else PARTS.index(part)
        found.append(known[key])
    columns = np.array(found, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _cpu_work(trace: Trace, around: Surroundings) -> Work:
    """Every op's own time, on all threads: when it was the innermost one of its thread.

    A range only says what is around; its time belongs to the op around it, or to nobody. Those of c10d's backends are
    work: that is all that a gloo thread shows.
    """
    works = np.array([_BACKEND_RANGE.match(name) is not None for name in trace.names], dtype=bool)
    pieces = _Pieces()
    running: list[_Running] = []  # outermost first
    holders = bytearray()  # by number: whether the op holds others
    on = now = -1
    every = np.ones(len(trace.ops), dtype=bool)
    for event in threads_events(trace, every, works[trace.ranges["name"]] | around.range_says):
        if event.thread != on:
            _run_until(UNKNOWN, now, running, pieces)
            on = event.thread
        _run_until(event.start, now, running, pieces)
        now = event.start
        _, name, said, number = running[-1] if running else (UNKNOWN, -1, NOTHING, -1)
        if event.op >= 0 or works[event.name]:
            if number >= 0:
                holders[number] = 1
            name, number = event.name, len(holders)
            holders.append(0)
        running.append((event.end, name, around.inside(said, event), number))
    _run_until(UNKNOWN, now, running, pieces)
    return pieces.work(trace, around, holders)


def _run_until(time: int, now: int, running: list[_Running], pieces: _Pieces) -> None:
    """Adds what runs in [now, time) to the pieces, and takes off the stack what has ended by then."""
    while running:
        end, name, said, number = running[-1]
        stop = min(end, time)
        if stop > now:
            if name >= 0:
                pieces.append(now, stop, name, said, number)
            now = stop
        if end > time:
            return
        running.pop()


class _Pieces:
    """Stretches of own time, as columns; what is said around each by number, since masks are of any size."""

    def __init__(self) -> None:
        self._columns = Columns("said", "op")
        self._said: dict[Said, int] = {}

    def append(self, start: int, end: int, name: int, said: Said, op: int) -> None:
        self._columns.append(start, end, name, self._said.setdefault(said, len(self._said)), op)

    def work(self, trace: Trace, around: Surroundings, holders: bytearray) -> Work:
        """The pieces in order of their start. `holders`: by op, whether it holds others."""
        order = np.argsort(self._columns["start"], kind="stable")
        start, end, name, number = (self._columns[column][order] for column in ("start", "end", "name", "said"))
        said = list(self._said)
        classes = _classify(trace, around, name.tolist(), [said[i] for i in number.tolist()])
        unknown = np.full(len(order), UNKNOWN, dtype=np.int64)
        computes = np.array([_COMPUTES.match(one) is not None for one in trace.names], dtype=bool)
        holds = np.frombuffer(holders, dtype=np.bool_)[self._columns["op"][order]] if len(order) else unknown != UNKNOWN
        may_wait = holds & ~computes[name] & (classes[0] == CLASSES.index("other"))
        return Work(None, start, end, unknown, unknown, name, *classes, may_wait)
