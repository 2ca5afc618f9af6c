"""Arithmetic of sets of time: union, intersection, difference, measure, and how much of each bin is covered.

A set is an int64 array [n, 2] of half-open intervals [start, end) in nanoseconds, sorted, disjoint, none of them empty
and no two touching, so that equal sets are equal arrays. Everything the reports say about overlap is computed here, on
such sets; nothing is found by adding up durations.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Intervals: TypeAlias = NDArray[np.int64]


def empty() -> Intervals:
    """The empty set."""
    return np.empty((0, 2), dtype=np.int64)


def union(starts: ArrayLike, ends: ArrayLike) -> Intervals:
    """The times covered by at least one of [starts[i], ends[i]), given in any order; empty ones cover nothing."""
    starts, ends = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return empty()
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.concatenate(([True], starts[1:] > reach[:-1]))  # nothing before reaches its start
    last = np.concatenate((first[1:], [True]))
    return np.stack((starts[first], reach[last]), axis=1)


def join(*sets: Intervals) -> Intervals:
    """The union of sets."""
    stacked = np.concatenate((empty(), *sets))
    return union(stacked[:, 0], stacked[:, 1])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Times in both sets."""
    return _select(a, b, both=True)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Times in `a` and not in `b`."""
    return _select(a, b, both=False)


def measure(a: Intervals) -> int:
    """Length of the set, nanoseconds."""
    return int((a[:, 1] - a[:, 0]).sum())


def contains(a: Intervals, times: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each time is in the set."""
    # Sorted borders alternate start, end: an odd number of them at or before a time means inside.
    return np.searchsorted(a.reshape(-1), times, side="right") % 2 == 1


def coverage(a: Intervals, edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share, 0 to 1, of each bin [edges[i], edges[i + 1]) that the set covers. `edges` increase strictly."""
    if not len(a):
        return np.zeros(len(edges) - 1)
    lengths = np.cumsum(a[:, 1] - a[:, 0])
    # How much of the set lies before a time: piecewise linear, known at every start and end.
    times = a.reshape(-1)
    before = np.stack((np.concatenate(([0], lengths[:-1])), lengths), axis=1).reshape(-1)
    origin = times[0]  # so that floats hold the differences exactly
    covered = np.diff(np.interp((edges - origin).astype(np.float64), (times - origin).astype(np.float64), before))
    return covered / np.diff(edges)


def _select(a: Intervals, b: Intervals, both: bool) -> Intervals:
    """Times in `a` that are in `b` (or not in `b`): cuts time at all borders and keeps the right pieces."""
    if not len(a):
        return empty()
    cuts = np.unique(np.concatenate((a.reshape(-1), b.reshape(-1))))
    starts, ends = cuts[:-1], cuts[1:]
    kept = contains(a, starts) & (contains(b, starts) == both)
    return union(starts[kept], ends[kept])
