"""Times of calls that are compared: interleaved in rounds, with cold or hot caches, device and host apart."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

import torch

from .implementation import Call, prepare, prepared

#: Bytes written and read before a call with cold caches, several times the 50 MB of an H200's second-level cache.
FLUSH_BYTES = 256 << 20
#: Clock cycles that the device sleeps before each timed call, about 2 ms: longer than the host needs to queue one.
SLEEP_CYCLES = 3_500_000
#: Calls of each before anything is timed: kernels are compiled and tuned, workspaces allocated.
WARM_UP = 3
#: Calls whose host time is taken; and between two waits for the device, so that the queue of launches never fills up.
HOST_CALLS, CALLS_PER_WAIT = 40, 10


class Times(NamedTuple):
    """Milliseconds of one call over all rounds. host: microseconds that it takes there, -1 if they were not taken."""

    median: float
    least: float
    most: float
    host: float = -1.0


class CallError(Exception):
    """A call failed while it was timed, by what is this error's cause. name: its key among the calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Makes an error of the block a `CallError` of that name."""
    try:
        yield
    except Exception as error:  # of any peer
        raise CallError(name) from error


def summary(spent: list[float]) -> Times:
    return Times(median(spent), min(spent), max(spent))


class Flush:
    """A buffer that replaces what the device's caches hold."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        self._sink = torch.empty((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()
        torch.amax(self._buffer, dim=0, out=self._sink)  # leaves clean lines, which cost nothing to evict


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Clock:
    """Spans of calls on a CUDA device by events, on a CPU by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, call: Call) -> float | None:
        """Milliseconds of a call; None where `collect` has them later, so that the host can go on."""
        if self._device.type != "cuda":
            begin = perf_counter_ns()
            call()
            return (perf_counter_ns() - begin) / 1e6
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        torch.cuda._sleep(SLEEP_CYCLES)
        events[0].record()
        call()
        events[1].record()
        self._open.append(events)
        return None

    def collect(self) -> list[float]:
        """Of the calls since the last time."""
        synchronize(self._device)
        spent = [begin.elapsed_time(end) for begin, end in self._open]
        self._open.clear()
        return spent


def time_rounds(calls: Mapping[str, Call], rounds: int, device: torch.device, cold: bool = True) -> dict[str, Times]:
    """Times each call once a round, beginning with another one every round.

    Interleaved, so that a clock which falls as the device gets hot falls for all of them.

    Args:
        cold: replace what the caches hold before each call. Otherwise a call finds what the call before left.

    Raises:
        CallError: one of them failed.
    """
    flush = Flush(device) if cold else None
    for name, call in calls.items():
        with naming(name):
            for _ in range(WARM_UP):
                prepared(call)
    names, clock = list(calls), _Clock(device)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        order = [names[(number + i) % len(names)] for i in range(len(names))]
        at_once = []
        for name in order:
            with naming(name):
                prepare(calls[name])
                if flush is not None:
                    flush()
                at_once.append(clock.time(calls[name]))
        later = iter(clock.collect())
        for name, span in zip(order, at_once, strict=True):
            spent[name].append(next(later) if span is None else span)
    return {name: summary(spans) for name, spans in spent.items()}


def host_time(call: Call, device: torch.device) -> float:
    """Median microseconds that the host spends in a call; a synchronous one waits for the device in it.

    What a call returns is freed outside of the time.
    """
    spent = []
    gc.disable()
    try:
        for number in range(HOST_CALLS):
            if number % CALLS_PER_WAIT == 0:
                synchronize(device)
            prepare(call)
            begin = perf_counter_ns()
            result = call()
            spent.append((perf_counter_ns() - begin) / 1e3)
            del result
    finally:
        gc.enable()
    synchronize(device)
    return median(spent)
