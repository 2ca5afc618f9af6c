"""From a trace file of torch.profiler (Kineto JSON) to columns of the events that the analysis needs.

Everything else - Python stacks, flow arrows, memory events, most arguments - is dropped while reading, so that memory
follows the number of kernels and ops (about 50 bytes each) and not the size of the file. `work.py` takes the columns.

The format: an object with `traceEvents` and a head (`distributedInfo`, `deviceProperties`, ...), or the events alone as
an array, as Chrome's trace viewer defines them; each complete event has `ph` "X", `ts` and `dur` in microseconds. Kinds
are told by `cat`: what Kineto's output_json.cpp and its ActivityType names write.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ProfileError
from .json_stream import CHUNK, Text, Truncated, items, members, value

#: `cat` of what runs on a device, of host calls that start it, of ops, and of ranges that users mark. Lower case.
DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
CALL_KINDS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
OP_KINDS = frozenset({"cpu_op", "operator"})
RANGE_KINDS = frozenset({"user_annotation"})

_EXPECTED = "a trace of torch.profiler (an object with traceEvents, or a list of events)"
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


class Columns:
    """Events of one kind: nanoseconds of start and end, the name's number, and integers that depend on the kind.

    Args:
        extra: names of the further columns.
    """

    def __init__(self, *extra: str) -> None:
        self._names = ("start", "end", "name", *extra)
        self._arrays = tuple(array("q") for _ in self._names)

    def append(self, *values: int) -> None:
        """One event, its values in the order of the columns."""
        for column, one in zip(self._arrays, values, strict=True):
            column.append(one)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        """A column as a view; no event may be appended while it lives."""
        column = self._arrays[self._names.index(name)]
        return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)


@dataclass
class Trace:
    """What is kept of one file. `names[i]` is the text of name number i, `threads[i]` the (pid, tid) of thread i.

    `device`: kernels, copies and memsets with `device`, `stream` and `correlation` (-1: none). `calls`: host calls into
    the CUDA run-time or driver, with `correlation` and `thread`. `ops` and `ranges`: PyTorch's ops and
    `record_function` ranges, with `thread`. An op that autograd has numbered also has its `sequence` (-1: none), under
    which its backward runs; `forward_thread` is above 0 where it is that backward. Times count from `origin`,
    nanoseconds of the trace's own clock.
    """

    path: Path
    rank: int | None = None
    world_size: int | None = None
    origin: int = 0
    num_events: int = 0
    names: list[str] = field(default_factory=list)
    threads: list[tuple[Any, Any]] = field(default_factory=list)
    device: Columns = field(default_factory=lambda: Columns("device", "stream", "correlation"))
    calls: Columns = field(default_factory=lambda: Columns("correlation", "thread"))
    ops: Columns = field(default_factory=lambda: Columns("thread", "sequence", "forward_thread"))
    ranges: Columns = field(default_factory=lambda: Columns("thread"))


def read_trace(path: str | Path, progress: Callable[[int], None] | None = None, chunk: int = CHUNK) -> Trace:
    """Reads one file, plain or gzip, in memory that does not grow with what it drops.

    Args:
        path: of the file.
        progress: called with the number of bytes of the file that have been read so far.
        chunk: bytes that are decoded at a time.

    Raises:
        ProfileError: the file is missing, empty, cut off, not UTF-8, no JSON, or no trace with kernels or CPU ops.
    """
    path = Path(path)
    trace = Trace(path)
    try:
        text = Text(path, chunk, progress)
    except FileNotFoundError:
        raise ProfileError(path, "a trace file", "no such file", exit_code=2) from None
    except OSError as error:
        raise ProfileError(path, "a readable file", error.strerror or error, exit_code=2) from None
    try:
        _read_document(text, trace)
    except Truncated:
        got = f"one that is cut off after {trace.num_events} events"
        raise ProfileError(path, "a whole trace", got) from None
    except json.JSONDecodeError as error:
        near = error.doc[max(error.pos, 0) : error.pos + 20]
        raise ProfileError(path, "JSON", f"{near!r} after {trace.num_events} events ({error.msg})") from None
    except RecursionError:
        raise ProfileError(path, _EXPECTED, "values nested too deeply") from None
    finally:
        text.close()
    if not (len(trace.device) or len(trace.ops)):
        raise ProfileError(path, "kernels or CPU ops", f"{trace.num_events} events of other kinds")
    if trace.rank is None and (found := _RANK_IN_NAME.search(path.name)):
        trace.rank = int(found[1])
    return trace


def _read_document(text: Text, trace: Trace) -> None:
    first = text.peek()
    if not first:
        raise ProfileError(trace.path, _EXPECTED, "an empty file")
    if first == "[":
        _read_events(text, trace)
    elif first == "{":
        _read_object(text, trace)
    else:
        raise ProfileError(trace.path, _EXPECTED, f"a JSON {_kind(value(text))}")
    if text.peek():
        got = f"{text.buffer[text.at : text.at + 20]!r} behind it"
        raise ProfileError(trace.path, "one JSON document", got)


def _read_object(text: Text, trace: Trace) -> None:
    keys: list[str] = []
    for key in members(text):
        keys.append(key)
        if key == "traceEvents" and text.peek() == "[":
            _read_events(text, trace)
            continue
        found = value(text)
        if key == "traceEvents":
            raise ProfileError(trace.path, "a list in traceEvents", f"a {_kind(found)}")
        if key == "distributedInfo" and isinstance(found, dict):
            trace.rank, trace.world_size = _integer(found.get("rank")), _integer(found.get("world_size"))
    if "traceEvents" not in keys:
        shown = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
        raise ProfileError(trace.path, _EXPECTED, f"an object with {shown}" if keys else "an empty object")


def _read_events(text: Text, trace: Trace) -> None:
    take = _Taker(trace)
    for event in items(text):
        if not isinstance(event, dict):
            got = f"a {_kind(event)} as element {trace.num_events}"
            raise ProfileError(trace.path, "a list of trace events", got)
        if "ph" not in event:
            keys = ", ".join(list(event)[:4]) or "nothing"
            got = f"an element {trace.num_events} with {keys}"
            raise ProfileError(trace.path, "a list of trace events, each with ph", got)
        trace.num_events += 1
        if event["ph"] == "X":
            take(event)


class _Taker:
    """Sorts complete events into the columns of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._has_origin = False

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.get("cat")
        kind = kind.lower() if isinstance(kind, str) else ""
        trace = self._trace
        if kind in OP_KINDS:
            if (span := self._span(event)) is not None:
                args = _arguments(event)
                numbers = (_integer(args.get(key)) for key in ("Sequence number", "Fwd thread id"))
                sequence, forward_thread = (-1 if number is None else number for number in numbers)
                trace.ops.append(*span, self._name(event), self._thread(event), sequence, forward_thread)
        elif kind in DEVICE_KINDS:
            if (span := self._span(event)) is not None:
                args = _arguments(event)
                device = _integer(args.get("device", event.get("pid")))
                stream = _integer(args.get("stream", event.get("tid")))
                where = (0 if device is None else device, 0 if stream is None else stream)
                trace.device.append(*span, self._name(event), *where, _correlation(args))
        elif kind in CALL_KINDS:
            if (span := self._span(event)) is not None:
                correlation = _correlation(_arguments(event))
                if correlation >= 0:
                    trace.calls.append(*span, self._name(event), correlation, self._thread(event))
        elif kind in RANGE_KINDS and (span := self._span(event)) is not None:
            trace.ranges.append(*span, self._name(event), self._thread(event))

    def _span(self, event: dict[str, Any]) -> tuple[int, int] | None:
        """Start and end, nanoseconds; None where the event has no usable time."""
        start, duration = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur", 0))
        if start is None or duration is None:
            return None
        if not self._has_origin:
            self._trace.origin, self._has_origin = start, True
        start -= self._trace.origin
        return start, start + max(duration, 0)

    def _name(self, event: dict[str, Any]) -> int:
        return _number(self._names, self._trace.names, str(event.get("name", "")))

    def _thread(self, event: dict[str, Any]) -> int:
        # As text: nothing keeps a file from giving a list here, which could not be looked up.
        return _number(self._threads, self._trace.threads, (str(event.get("pid")), str(event.get("tid"))))


def _number(numbers: dict[Any, int], values: list[Any], one: Any) -> int:
    found = numbers.get(one)
    if found is None:
        found = numbers[one] = len(values)
        values.append(one)
    return found


def _arguments(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _correlation(args: dict[str, Any]) -> int:
    found = _integer(args.get("correlation"))
    return -1 if found is None or found <= 0 else found  # Kineto writes 0 where CUPTI gave none


def _integer(found: Any) -> int | None:
    if isinstance(found, str) and found.isdecimal():
        found = int(found)
    return int(found) if isinstance(found, int) and abs(found) < 1 << 62 else None


def _nanoseconds(microseconds: Any) -> int | None:
    """Exact for integers of any size; a float keeps its own precision (traces of microseconds since 1970 need that)."""
    if isinstance(microseconds, int):
        return microseconds * 1000 if abs(microseconds) < 1 << 52 else None
    if isinstance(microseconds, float) and math.isfinite(microseconds) and abs(microseconds) < 1 << 52:
        whole = int(microseconds)
        return whole * 1000 + round((microseconds - whole) * 1000)
    return None


def _kind(found: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(found), "number")
