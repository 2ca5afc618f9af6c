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
    (first, last), num_steps = _window(work, steps)
    window = intervals.union([first], [last])
    times = _times(work, window)
    scale = 1e6 * max(num_steps, 1)  # nanoseconds of the window in a millisecond of a step

    def ms(a: Intervals) -> float:
        return measure(a) / scale

    busy = intervals.join(*times.classes.values())
    idle = intervals.subtract(window, busy)
    in_window = (work.start >= first) & (work.start < last)
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
        lanes=_lanes(times, first, last),
    )


def _window(work: Work, steps: NDArray[np.int64]) -> tuple[tuple[int, int], int]:
    """Start and end of what is looked at, and how many whole steps that is; 0 where no steps are marked.

    On a device a step is what the host launched in it: its kernels run later than the host's range says. So the window
    goes from the first kernel of the first step to the last kernel of the last one.
    """
    whole = int(work.start.min()), int(work.end.max())
    if not len(steps):
        return whole, 0
    first, last = int(steps[0, 0]), int(steps[-1, 1])
    if work.device is None:
        return (first, last), len(steps)
    launched = (work.launch_start >= first) & (work.launch_start < last)
    if launched.any():
        return (int(work.start[launched].min()), int(work.end[launched].max())), len(steps)
    return whole, 0  # steps of which nothing ran here


def _times(work: Work, window: Intervals) -> _Times:
    def of(chosen: NDArray[np.bool_]) -> Intervals:
        return intervals.intersect(intervals.union(work.start[chosen], work.end[chosen]), window)

    classes = {name: of(work.work_class == i) for i, name in enumerate(CLASSES)}
    compute = intervals.join(*(classes[name] for name in COMPUTE))
    communication = classes["communication"]
    exposed = intervals.subtract(communication, compute)
    exposed_memory = intervals.subtract(classes["memory"], intervals.join(compute, communication))
    host, waits = (intervals.intersect(gaps, window) for gaps in _gaps(work))
    return _Times(classes, compute, communication, exposed, exposed_memory, host, waits)


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

    def of(chosen: NDArray[np.bool_]) -> Intervals:
        return intervals.intersect(intervals.union(work.start[chosen], work.end[chosen]), window)

    parts, sets = {}, {}
    for i, name in enumerate(PARTS):
        chosen = work.part == i
        sets[name] = of(chosen)
        exposed = intervals.intersect(of(chosen & _communicates(work)), times.exposed)
        count = int((chosen & in_window).sum())
        parts[name] = PartTime(measure(sets[name]) / scale, measure(exposed) / scale, count)
    communication = intervals.intersect(of((work.part >= 0) & _communicates(work)), times.exposed)
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
