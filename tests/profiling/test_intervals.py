"""Interval arithmetic against a time line of single nanoseconds, where a set is a set of integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_megakernel.profiling import intervals

PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def make(pieces: list[tuple[int, int]]) -> intervals.Intervals:
    starts = [start for start, _ in pieces]
    return intervals.union(starts, [start + length for start, length in pieces])


def ticks(a: intervals.Intervals) -> set[int]:
    return {tick for start, end in a.tolist() for tick in range(start, end)}


def covered(pieces: list[tuple[int, int]]) -> set[int]:
    return {tick for start, length in pieces for tick in range(start, start + length)}


def check(a: intervals.Intervals, expected: set[int]) -> None:
    """`a` has the expected content and the form that the module promises."""
    assert ticks(a) == expected
    assert a.dtype == np.int64
    assert a.shape == (len(a), 2)
    borders = a.reshape(-1)
    assert (np.diff(borders) > 0).all(), "sorted, no interval empty, none touching another"
    assert intervals.measure(a) == len(expected)


@given(PIECES)
def test_union(pieces):
    check(make(pieces), covered(pieces))


@given(PIECES, PIECES)
def test_pairs(one, other):
    a, b = make(one), make(other)
    check(intervals.intersect(a, b), covered(one) & covered(other))
    check(intervals.subtract(a, b), covered(one) - covered(other))
    check(intervals.join(a, b), covered(one) | covered(other))


@given(PIECES, st.lists(st.integers(-3, 60), min_size=2, max_size=10, unique=True))
def test_coverage(pieces, edges):
    edges = np.array(sorted(edges), dtype=np.int64)
    found = intervals.coverage(make(pieces), edges)
    expected = [
        len(covered(pieces) & set(range(low, high))) / (high - low)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    assert found == pytest.approx(expected)


def test_coverage_is_exact_far_from_zero():
    far = 1_790_857_026_000_000_000
    a = intervals.union([far + 1, far + 7], [far + 3, far + 8])
    assert intervals.coverage(a, np.array([far, far + 2, far + 8])).tolist() == [0.5, 2 / 6]


def test_touching_intervals_are_one():
    assert intervals.union([5, 0, 9], [9, 5, 9]).tolist() == [[0, 9]]


def test_join_of_nothing():
    assert intervals.join().shape == (0, 2)
