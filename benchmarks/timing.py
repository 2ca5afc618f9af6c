"""Times on the device: cold caches, one implementation after the other in rounds, and a queue that never runs dry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .layers import Call

#: Bytes written and read before each timed call, several times the 50 MB of an H200's second-level cache.
FLUSH_BYTES = 256 << 20
#: Clock cycles that the device sleeps before each timed call, about 2 ms: longer than the host needs to queue one.
SLEEP_CYCLES = 3_500_000


class Times(NamedTuple):
    """Milliseconds of one implementation over all rounds."""

    median: float
    least: float
    most: float


class Flush:
    """A buffer that replaces what the caches hold."""

    def __init__(self) -> None:
        self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.empty((), dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()
        torch.amax(self._buffer, dim=0, out=self._sink)  # leaves clean lines, which cost nothing to evict


def median(values: list[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def time_rounds(calls: Mapping[str, Call], rounds: int, warm_up: int = 2) -> dict[str, Times]:
    """Times each call once a round, beginning with another one every round.

    Interleaved, so that a clock which falls as the device gets hot falls for all of them.
    """
    flush = Flush()
    for call in calls.values():
        for _ in range(warm_up):
            call()
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds):
        for i in range(len(names)):
            name = names[(number + i) % len(names)]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            calls[name]()
            end.record()
            spans[name].append((begin, end))
        torch.cuda.synchronize()
    result = {}
    for name, events in spans.items():
        spent = [begin.elapsed_time(end) for begin, end in events]
        result[name] = Times(median(spent), min(spent), max(spent))
    return result


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| on the device, in float32 by parts of the rows."""
    difference = torch.zeros((), dtype=torch.float64, device=expected.device)
    norm = torch.zeros_like(difference)
    for a, e in zip(actual.detach().split(4096), expected.detach().split(4096), strict=True):
        difference += (a.float() - e.float()).square().sum(dtype=torch.float64)
        norm += e.float().square().sum(dtype=torch.float64)
    return float((difference / norm).sqrt())
