"""What stands around the work of a trace: the ops and ranges of its host thread, and what stood around its forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .autograd import find_backward_ops
from .reader import Columns, Trace
from .rules import Rules

_BLOCK = 1 << 16


class Event(NamedTuple):
    """An op or a range on a host thread. op: its number among the trace's ops, -1 for a range."""

    thread: int
    start: int
    end: int
    name: int
    op: int


class Said(NamedTuple):
    """What open ops and ranges say, as masks: a bit a rule, of any number (`Rules.surroundings`).

    Attributes:
        own: all of them.
        of_forward: what stood around the op whose gradient the innermost backward op computes, since autograd runs
            that one outside of all ranges.
        own_again, of_forward_again: what is left of both for a forward that runs again inside that backward op, as
            checkpoints make it. The op happened to be the first to need its results: its own name says nothing, and
            of what stood around its forward only that which the forwards do not say themselves as they run again.
            That stood around the checkpoint, everything else inside.
    """

    own: int = 0
    of_forward: int = 0
    own_again: int = 0
    of_forward_again: int = 0


NOTHING = Said()


class Surroundings:
    """Answers what stands around events of a trace, and what that makes of a piece of work."""

    def __init__(self, trace: Trace, rules: Rules) -> None:
        self._trace, self._rules = trace, rules
        self._names = np.array([rules.surroundings(name) for name in trace.names], dtype=object)
        self.range_says = self._names[trace.ranges["name"]] != 0
        self._op_says = self._names[trace.ops["name"]] != 0
        self._of_forward: dict[int, int] = {}
        self._backward = backward = find_backward_ops(trace)
        any_again = bool(backward.runs_again.any())
        self._said_inside = self._inside_backwards() if any_again else {}
        self._op_says |= backward.runs_again
        for _ in range(2 if any_again else 1):  # the second time for forwards that are inside of backwards themselves
            found = self.around(trace.ops, np.unique(backward.forward))
            pairs = zip(backward.backward.tolist(), backward.forward.tolist(), strict=True)
            self._of_forward = {
                one: found[other].own | found[other].of_forward for one, other in pairs if other in found
            }
            self._op_says[list(self._of_forward)] = True

    def _inside_backwards(self) -> dict[int, int]:
        """backward op -> what the ranges and the other ops inside it say, or-ed."""
        inside: dict[int, int] = {}
        open_ops: list[Event] = []  # backward ones around the event on its thread
        on = -1
        for event in threads_events(self._trace, self._op_says | self._backward.is_backward, self.range_says):
            if event.thread != on:
                open_ops, on = [], event.thread
            open_ops = [op for op in open_ops if op.end > event.start]
            if event.op >= 0 and self._backward.is_backward[event.op]:
                open_ops.append(event)
                continue
            for op in open_ops:
                inside[op.op] = inside.get(op.op, 0) | int(self._names[event.name])
        return inside

    def inside(self, said: Said, event: Event) -> Said:
        """What is said inside an op or a range, where `said` is said around it."""
        says = int(self._names[event.name])
        if event.op >= 0 and self._backward.is_backward[event.op]:
            of_forward = self._of_forward.get(event.op, said.of_forward)
            again = of_forward & ~self._said_inside.get(event.op, 0)
            return Said(said.own | says, of_forward, said.own_again, again)
        if event.op >= 0 and self._backward.runs_again[event.op]:
            own, of_forward = said.own_again | says, said.of_forward_again
            return Said(own, of_forward, own, of_forward)
        return Said(said.own | says, said.of_forward, said.own_again | says, said.of_forward_again)

    def around(self, events: Columns, chosen: NDArray[np.int64]) -> dict[int, Said]:
        """event -> what is said around its start on its thread, for those around which anything is said."""
        spans = threads_events(self._trace, self._op_says, self.range_says)
        asked = chosen[np.lexsort((events["start"][chosen], events["thread"][chosen]))]
        found: dict[int, Said] = {}
        open_spans: list[Event] = []  # those around the event on its thread
        on = -1
        ahead = next(spans, None)
        for event, time, thread in _rows(asked, events["start"][asked], events["thread"][asked]):
            if thread != on:
                open_spans, on = [], thread
            while ahead is not None and (ahead.thread, ahead.start) <= (thread, time):
                if ahead.thread == thread:
                    open_spans.append(ahead)
                ahead = next(spans, None)
            open_spans = [span for span in open_spans if span.end > time]
            said = functools.reduce(self.inside, open_spans, NOTHING)
            if said.own or said.of_forward:
                found[event] = said
        return found

    def classify(self, name: str, said: Said) -> tuple[str, str | None]:
        """Class and part of a piece of work. Of the forward only the part is taken, and where nothing else tells it."""
        work_class, part = self._rules.classify(name, said.own)
        if part is None and said.of_forward:
            _, part = self._rules.classify(name, said.own | said.of_forward)
        return work_class, part


def threads_events(trace: Trace, ops: NDArray[np.bool_], ranges: NDArray[np.bool_]) -> Iterator[Event]:
    """The chosen ops and ranges, thread by thread in order of start, outer ones first."""
    columns = []
    for events, chosen, is_op in ((trace.ops, ops, True), (trace.ranges, ranges, False)):
        kept = np.flatnonzero(chosen)
        taken = [events[column][kept] for column in ("thread", "start", "end", "name")]
        columns.append((*taken, kept if is_op else np.full(len(kept), -1)))
    thread, start, end, name, op = (np.concatenate(pair) for pair in zip(*columns, strict=True))
    order = np.lexsort((-end, start, thread))
    return (Event(*row) for row in _rows(*(column[order] for column in (thread, start, end, name, op))))


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of Python values, made a block at a time: whole columns of Python integers would take gigabytes."""
    for i in range(0, len(columns[0]), _BLOCK):
        yield from zip(*(column[i : i + _BLOCK].tolist() for column in columns), strict=True)
