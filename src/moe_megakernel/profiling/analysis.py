"""What the pieces of work on a device say: how its time splits, what communication costs, and what overlap would give.

All times are measures of sets of time (`intervals.py`). With W the window that is looked at, and C, N, M the times in W
at which compute (classes gemm, attention, other), communication and memory copies run on any stream of the device:

    span = |W|          busy = |C + N + M|              idle = span - busy
    communication = |N| exposed communication = |N - C| overlapped communication = |N and C|
    memory = |M|        exposed memory = |M - C - N|
    span = |C| + exposed communication + exposed memory + idle

`docs/profile.md` explains the words to users; `report.py` holds the results and shows them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import intervals
from .intervals import Intervals, measure
from .reader import Trace
from .report import Communication, Estimate, PartTime, Row, WorkTime
from .rules import CLASSES, COMPUTE, PARTS, Rules
from .work import UNKNOWN, Work, find_work, step_ranges

#: Bins of a row's time line in the picture.
BINS = 2000
#: Communication kernels that a row names, those with the longest exposed time.
NAMED = 5


@dataclass(frozen=True)
class _Times:
    """Sets of time in the window, nanoseconds."""

    classes: dict[str, Intervals]
    compute: Intervals
    communication: Intervals
    exposed: Intervals
    exposed_memory: Intervals
    host_gaps: Intervals
    waits: Intervals


def analyse(trace: Trace, rules: Rules) -> list[Row]:
    """A row for every device of the trace that has work, or one for the CPU.

    Args:
        trace: as `reader.read_trace` gives it.
        rules: as `rules.load_rules` gives them.
    """
    steps = step_ranges(trace)
    return [_row(trace, work, steps) for work in find_work(trace, rules) if len(work.start)]


def _row(trace: Trace, work: Work, steps: NDArray[np.int64]) -> Row:
    window, num_steps = _window(work, steps)
    times = _times(work, window)
    scale = 1e6 * max(num_steps, 1)  # nanoseconds of the window in a millisecond of a step

    def ms(a: Intervals) -> float:
        return measure(a) / scale

    busy = intervals.join(*times.classes.values())
    idle = intervals.subtract(window, busy)
    in_window = intervals.contains(window, work.start)
    classes = {
        name: WorkTime(ms(a), _sum(work, in_window & (work.work_class == i)) / scale, _count(work, in_window, i))
        for i, (name, a) in enumerate(times.classes.items())
    }
    parts, moe, moe_communication, experts = _moe(work, window, times, in_window, scale)
    hidden = min(ms(moe_communication), ms(intervals.subtract(experts, times.communication)))
    return Row(
        file=str(trace.path),
        rank=trace.rank or 0,
        world_size=trace.world_size,
        device="cpu" if work.device is None else f"gpu {work.device}",
        steps=num_steps,
        span_ms=ms(window),
        busy_ms=ms(busy),
        compute_ms=ms(times.compute),
        communication_ms=ms(times.communication),
        exposed_communication_ms=ms(times.exposed),
        overlapped_communication_ms=ms(intervals.subtract(times.communication, times.exposed)),
        memory_ms=ms(times.classes["memory"]),
        exposed_memory_ms=ms(times.exposed_memory),
        idle_ms=ms(idle),
        idle_host_ms=None if work.device is None else ms(times.host_gaps),
        idle_wait_ms=None if work.device is None else ms(times.waits),
        classes=classes,
        moe_ms=ms(moe),
        moe_exposed_communication_ms=ms(moe_communication),
        moe=parts,
        estimate=Estimate(ms(window) - ms(times.exposed), hidden, ms(window) - hidden),
        communication=_named(trace, work, times.exposed, in_window, scale),
        lanes=_lanes(times, int(window[0, 0]), int(window[-1, 1])),
    )


def _window(work: Work, steps: NDArray[np.int64]) -> tuple[Intervals, int]:
    """The time that is looked at, and how many whole steps that is: all there is and 0, where no steps are marked.

    For a CPU it is the time in which the host was in a step. On a device a step is what the host launched in it, which
    runs later than the host's range says: from its first kernel to the first one of the next step, or to its own last
    one if the device did something else in between (an evaluation, say). Of the last step: to its last kernel.
    """
    whole = intervals.union([work.start.min()], [work.end.max()])
    steps = steps[steps[:, 1] > steps[:, 0]]
    if not len(steps):
        return whole, 0
    if work.device is None:
        return intervals.union(steps[:, 0], steps[:, 1]), len(steps)
    step = np.searchsorted(steps[:, 0], work.launch_start, "right") - 1
    launched_in_one = (step >= 0) & (work.launch_start < steps[step, 1])
    if not launched_in_one.any():
        return whole, 0
    used, group = np.unique(step[launched_in_one], return_inverse=True)
    begin, end = np.full(len(used), UNKNOWN), np.full(len(used), -UNKNOWN)
    np.minimum.at(begin, group, work.start[launched_in_one])
    np.maximum.at(end, group, work.end[launched_in_one])
    others = work.start[~launched_in_one & (work.launch_start != UNKNOWN)]
    between = np.searchsorted(others, begin[1:]) > np.searchsorted(others, end[:-1])
    end[:-1] = np.where(between, end[:-1], np.maximum(end[:-1], begin[1:]))
    return intervals.union(begin, end), len(used)


def _times(work: Work, window: Intervals) -> _Times:
    communication = _when(work, _communicates(work), window)
    classes = {name: _when(work, work.work_class == i, window, communication) for i, name in enumerate(CLASSES)}
    compute = intervals.join(*(classes[name] for name in COMPUTE))
    exposed = intervals.subtract(communication, compute)
    exposed_memory = intervals.subtract(classes["memory"], intervals.join(compute, communication))
    host, waits = (intervals.intersect(gaps, window) for gaps in _gaps(work))
    return _Times(classes, compute, communication, exposed, exposed_memory, host, waits)


def _when(
    work: Work, chosen: NDArray[np.bool_], window: Intervals, communication: Intervals | None = None
) -> Intervals:
    """When any of the chosen pieces ran in the window; what may wait does not count while communication runs."""
    found = intervals.union(work.start[chosen], work.end[chosen])
    if communication is not None and (chosen & work.may_wait).any():
        firm, loose = chosen & ~work.may_wait, chosen & work.may_wait
        found = intervals.subtract(intervals.union(work.start[loose], work.end[loose]), communication)
        found = intervals.join(found, intervals.union(work.start[firm], work.end[firm]))
    return intervals.intersect(found, window)


def _gaps(work: Work) -> tuple[Intervals, Intervals]:
    """Times between pieces in which nothing ran: because nothing was launched, and because of something else.

    A gap is the host's where the call that launched the work behind it ended after the gap had begun: the queue was
    empty. Otherwise that work had been launched and waited for an event, another stream or another GPU. Gaps before
    work whose launch is unknown are in neither set.
    """
    busy = intervals.union(work.start, work.end)
    if len(busy) < 2:
        return intervals.empty(), intervals.empty()
    begin, end = busy[:-1, 1], busy[1:, 0]
    # Several streams may start at the same time: the queue was empty if none of theirs had been launched.
    at = np.stack((np.searchsorted(work.start, end, "left"), np.searchsorted(work.start, end, "right")), axis=1)
    launched = np.minimum.reduceat(np.append(work.launch_end, UNKNOWN), at.reshape(-1))[::2]
    known = launched != UNKNOWN
    host = known & (launched > begin)
    waits = known & ~host
    return intervals.union(begin[host], end[host]), intervals.union(begin[waits], end[waits])


def _moe(
    work: Work, window: Intervals, times: _Times, in_window: NDArray[np.bool_], scale: float
) -> tuple[dict[str, PartTime], Intervals, Intervals, Intervals]:
    """Times of the parts, and the sets: the whole layer, its exposed communication, its expert GEMMs."""

    parts, sets = {}, {}
    for i, name in enumerate(PARTS):
        chosen = work.part == i
        sets[name] = _when(work, chosen, window, times.communication)
        exposed = intervals.intersect(_when(work, chosen & _communicates(work), window), times.exposed)
        count = int((chosen & in_window).sum())
        parts[name] = PartTime(measure(sets[name]) / scale, measure(exposed) / scale, count)
    chosen = (work.part >= 0) & _communicates(work)
    communication = intervals.intersect(_when(work, chosen, window), times.exposed)
    return parts, intervals.join(*sets.values()), communication, sets["expert_gemm"]


def _communicates(work: Work) -> NDArray[np.bool_]:
    return work.work_class == CLASSES.index("communication")


def _sum(work: Work, chosen: NDArray[np.bool_]) -> int:
    return int((work.end[chosen] - work.start[chosen]).sum())


def _count(work: Work, in_window: NDArray[np.bool_], work_class: int) -> int:
    return int((in_window & (work.work_class == work_class)).sum())


def _named(
    trace: Trace, work: Work, exposed: Intervals, in_window: NDArray[np.bool_], scale: float
) -> list[Communication]:
    """The communication kernels with the longest exposed time, added up by name."""
    chosen = in_window & _communicates(work)
    if not chosen.any():
        return []
    names, group = np.unique(work.name[chosen], return_inverse=True)
    start, end = work.start[chosen], work.end[chosen]
    before = np.concatenate(([0], np.cumsum(exposed[:, 1] - exposed[:, 0])))

    def exposed_before(times: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.searchsorted(exposed[:, 0], times, "right") - 1  # the last interval that starts at or before
        inside = np.minimum(times, exposed[at, 1]) - exposed[at, 0]
        return np.where(at >= 0, before[np.maximum(at, 0)] + inside, 0)

    alone = exposed_before(end) - exposed_before(start) if len(exposed) else np.zeros_like(start)
    total, share, count = (np.bincount(group, weights) for weights in (end - start, alone, None))
    found = [
        Communication(trace.names[name], int(count[i]), float(total[i]) / scale, float(share[i]) / scale)
        for i, name in enumerate(names.tolist())
    ]
    return sorted(found, key=lambda one: (-one.exposed_ms, -one.sum_ms))[:NAMED]


def _lanes(times: _Times, first: int, last: int) -> dict[str, NDArray[np.float64]]:
    """For the picture: the share of each bin of the window that each kind of time covers, and the bins' edges in ms."""
    bins = max(min(BINS, last - first), 1)
    edges = np.unique(np.linspace(first, max(last, first + 1), bins + 1).astype(np.int64))
    sets = {
        **times.classes,
        "exposed communication": times.exposed,
        "idle: host": times.host_gaps,
        "idle: waiting": times.waits,
    }
    lanes = {name: intervals.coverage(a, edges) for name, a in sets.items()}
    return {"edges": (edges - first) / 1e6, **lanes}
