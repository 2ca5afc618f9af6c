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
        elsewhere: those of `own` that are said by others than backward ops. A forward that runs again inside a backward
            op, as checkpoints make it, hears these only: the backward op happened to be the first to need its results.
        of_forward: what stood around the op whose gradient the innermost backward op computes, since autograd runs
            that one outside of all ranges.
    """

    own: int = 0
    elsewhere: int = 0
    of_forward: int = 0


NOTHING = Said()


class Surroundings:
    """Answers what stands around events of a trace, and what that makes of a piece of work."""

    def __init__(self, trace: Trace, rules: Rules) -> None:
        self._trace, self._rules = trace, rules
        self._names = np.array([rules.surroundings(name) for name in trace.names], dtype=object)
        self.range_says = self._names[trace.ranges["name"]] != 0
        self._op_says = self._names[trace.ops["name"]] != 0
        self._of_forward: dict[int, int] = {}
        backward = find_backward_ops(trace)
        self._is_backward, self._runs_again = backward.numbered, backward.again
        self._op_says |= self._runs_again  # a forward may itself be one that runs again
        if len(backward.backward):
            found = self.around(trace.ops, np.unique(backward.forward))
            pairs = zip(backward.backward.tolist(), backward.forward.tolist(), strict=True)
            self._of_forward = {one: found[other].own for one, other in pairs if other in found}
        self._op_says |= self._is_backward

    def inside(self, said: Said, event: Event) -> Said:
        """What is said inside an op or a range, where `said` is said around it."""
        says = int(self._names[event.name])
        if event.op >= 0 and self._is_backward[event.op]:
            return Said(said.own | says, said.elsewhere, self._of_forward.get(event.op, 0))
        if event.op >= 0 and self._runs_again[event.op]:
            return Said(said.elsewhere | says, said.elsewhere | says, 0)
        return Said(said.own | says, said.elsewhere | says, said.of_forward)

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
