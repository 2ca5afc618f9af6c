"""Which op's gradient a backward op computes, and which forward ops run again inside of a backward.

Autograd numbers ops by thread. A backward op carries the number of its forward, and in `Fwd thread id` the thread of
it, counted in a way that nothing else in a trace uses: which of the trace's threads is meant has to be found out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .reader import Columns, Trace

#: Above it are the numbers of what has no forward: AccumulateGrad's is the largest that there is.
_LARGEST_NUMBER = 1 << 31
#: Backward ops by which a thread is found out, all candidates together; and for each of them at least.
_SAMPLE, _LEAST_SAMPLE = 4096, 16
_BACKWARD_NAME = re.compile(r"(\w+?)Backward\d*$")


@dataclass(frozen=True)
class BackwardOps:
    """What autograd's numbers tell of a trace's ops. Arrays hold indices of ops.

    Attributes:
        is_backward: mask of all ops: backward ops that have a number.
        runs_again: mask of all ops: numbered ones that are no backward but run inside one, as a forward does that a
            checkpoint runs again. So do the ops of a backward of which a graph is kept (`create_graph`); nothing tells
            the two apart.
        backward, forward: a backward op, and the op whose gradient it computes, for those where that one is known.
    """

    is_backward: NDArray[np.bool_]
    runs_again: NDArray[np.bool_]
    backward: NDArray[np.int64]
    forward: NDArray[np.int64]


def find_backward_ops(trace: Trace) -> BackwardOps:
    """Reads the numbers. A forward is the last op with that number that had begun on the thread that is meant."""
    ops = trace.ops
    has_number = (ops["sequence"] >= 0) & (ops["sequence"] < _LARGEST_NUMBER)
    is_backward = has_number & (ops["forward_thread"] > 0)
    backward, forward = np.flatnonzero(is_backward), np.flatnonzero(has_number & ~is_backward)
    runs_again = _inside(ops, backward, forward)
    if not len(backward) or not len(forward):
        nothing = np.empty(0, dtype=np.int64)
        return BackwardOps(is_backward, runs_again, nothing, nothing)
    begun = _Begun(ops, forward)
    found = begun.last(backward, _threads_of_forwards(trace, backward, forward, begun))
    return BackwardOps(is_backward, runs_again, backward[found >= 0], found[found >= 0])


def _inside(ops: Columns, outer: NDArray[np.int64], inner: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of all ops: those of `inner` that begin inside one of `outer` on their thread."""
    mask = np.zeros(len(ops), dtype=np.bool_)
    if not len(outer) or not len(inner):
        return mask
    origin = min(int(ops["start"].min()), 0)
    length = max(int(ops["end"].max()), 0) - origin + 1  # threads one behind the other on one line of time

    def on_line(column: str, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        # As floats, exact to 2^53: an integer could overflow where a file has absurd times.
        return ops["thread"][chosen].astype(np.float64) * length + (ops[column][chosen] - origin)

    outer = outer[np.argsort(on_line("start", outer), kind="stable")]
    ends = np.maximum.accumulate(on_line("end", outer))
    begun = np.searchsorted(on_line("start", outer), on_line("start", inner), "right") - 1
    mask[inner] = (begun >= 0) & (ends[begun] > on_line("start", inner))
    return mask


class _Begun:
    """Of some ops the last one of a number that had begun on a thread at a time."""

    def __init__(self, ops: Columns, chosen: NDArray[np.int64]) -> None:
        self._ops = ops
        place = ops["thread"][chosen] * _LARGEST_NUMBER + ops["sequence"][chosen]
        order = np.lexsort((ops["start"][chosen], place))
        self._chosen = chosen[order]
        self._places, self._first, group = np.unique(place[order], return_index=True, return_inverse=True)
        self._starts = np.sort(ops["start"][chosen])
        self._keys = self._key(group, ops["start"][self._chosen])

    def last(self, asked: NDArray[np.int64], thread: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each op of `asked` the last one before it of its number on that thread, -1 where there is none."""
        place = thread * _LARGEST_NUMBER + self._ops["sequence"][asked]
        group = np.minimum(np.searchsorted(self._places, place), len(self._places) - 1)
        at = np.searchsorted(self._keys, self._key(group, self._ops["start"][asked])) - 1
        return np.where((self._places[group] == place) & (at >= self._first[group]), self._chosen[at], -1)

    def _key(self, group: NDArray[np.int64], start: NDArray[np.int64]) -> NDArray[np.int64]:
        """One number that orders by group, then by start."""
        return group * (len(self._starts) + 1) + np.searchsorted(self._starts, start)


def _threads_of_forwards(
    trace: Trace, backward: NDArray[np.int64], forward: NDArray[np.int64], begun: _Begun
) -> NDArray[np.int64]:
    """The thread of the trace that each backward op's `forward_thread` means.

    It is the one that has, of a sample of all backward ops that name it, most forwards: first those whose names agree
    (`aten::addmm`, `AddmmBackward0`), then all; of equals the one whose last began last.
    """
    ops = trace.ops
    threads, column = np.unique(ops["thread"][forward], return_inverse=True)
    plain = _plain_names(trace)
    # (thread, number) by number, to see on which threads one was used.
    places = np.unique(ops["sequence"][forward] * len(threads) + column)
    numbers, columns = places // len(threads), places % len(threads)
    named = ops["forward_thread"][backward]
    order = np.argsort(named, kind="stable")
    meant = np.empty(len(backward), dtype=np.int64)
    for of_one in np.split(order, np.flatnonzero(np.diff(named[order])) + 1):
        stride = -(-len(of_one) // max(_SAMPLE // len(threads), _LEAST_SAMPLE))
        sample = backward[of_one[::-1][::stride]]
        first, behind = (np.searchsorted(numbers, ops["sequence"][sample], side) for side in ("left", "right"))
        counts = behind - first
        asked = np.repeat(sample, counts)
        on = columns[np.arange(len(asked)) + np.repeat(first - np.cumsum(counts) + counts, counts)]
        found = begun.last(asked, threads[on])
        asked, on, found = asked[found >= 0], on[found >= 0], found[found >= 0]
        agreeing = plain[ops["name"][asked]] == plain[ops["name"][found]]
        latest = np.full(len(threads), np.iinfo(np.int64).min)
        np.maximum.at(latest, on, ops["start"][found])
        scores = (latest, np.bincount(on, minlength=len(threads)), np.bincount(on[agreeing], minlength=len(threads)))
        meant[of_one] = threads[np.lexsort(scores)[-1]]
    return meant


def _plain_names(trace: Trace) -> NDArray[np.int64]:
    """By number of a name: equal numbers for an op and for its gradient, as far as names tell."""
    known: dict[str, int] = {}
    plain = []
    for name in trace.names:
        match = _BACKWARD_NAME.search(name)
        word = match[1] if match else name.rpartition("::")[2]
        plain.append(known.setdefault(word.replace("_", "").lower(), len(known)))
    return np.array(plain, dtype=np.int64)
