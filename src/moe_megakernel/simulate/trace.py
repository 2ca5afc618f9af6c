"""Writes a simulation as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process for each shown rank with a track for each block, and one for the links of all ranks with two tracks a rank.
Time stamps are microseconds of simulated time. Called by the command line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_megakernel.plan_names import TaskKind

from .layer import Layer

_ALL_RANKS = 8  # so many ranks are shown whole; of more, the first and the slowest
_LINKS = 10_000  # process numbers, above every rank's


def trace_events(layer: Layer, offset: float = 0.0) -> list[dict[str, Any]]:
    """Events of one direction, `offset` seconds after the start of the trace."""
    events: list[dict[str, Any]] = []
    for rank in shown_ranks(layer):
        events += _rank_events(layer, rank, offset)
    return events + _link_events(layer, offset)


def write_trace(layers: list[Layer], path: Path) -> None:
    """Writes all directions, one after the other in time. They must have been simulated with `record`."""
    events: list[dict[str, Any]] = []
    offset = 0.0
    for layer in layers:
        events += trace_events(layer, offset)
        offset += float(layer.run.ends.max())
    # Both directions name the same tracks.
    names = {(e["name"], e["pid"], e["tid"]): e for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] != "M"]
    path.write_text(json.dumps({"traceEvents": [*names.values(), *spans], "displayTimeUnit": "ns"}))


def shown_ranks(layer: Layer) -> list[int]:
    """Ranks whose blocks are in the trace."""
    count = len(layer.run.ranks)
    if count <= _ALL_RANKS:
        return list(range(count))
    slowest = int(np.argmax([rank.end for rank in layer.run.ranks]))
    return sorted({0, slowest})


def _rank_events(layer: Layer, index: int, offset: float) -> list[dict[str, Any]]:
    rank, stream = layer.run.ranks[index], layer.streams[index]
    blocks = layer.costs.clusters * 2
    events = [_name("process_name", index, 0, f"rank {index}")]
    events += [_name("thread_name", index, block, f"block {block}") for block in range(blocks)]
    events.append(_name("thread_name", index, blocks, "combine"))
    for task, cluster, start, end in rank.spans or []:
        name = TaskKind(int(stream.kind[task])).name.lower()
        minibatch = int(stream.minibatch[task])
        for block in (2 * cluster, 2 * cluster + 1):
            events.append(_span(name, index, block, start + offset, end - start, {"minibatch": minibatch}))
    combine = layer.costs.combine_seconds(layer.options.tokens)
    events.append(_span("combine", index, blocks, layer.run.combine_start + offset, combine, {}))
    return events


def _link_events(layer: Layer, offset: float) -> list[dict[str, Any]]:
    """Runs of steps in which a link moved bytes, with the share of its bandwidth."""
    run, count = layer.run, len(layer.run.ranks)
    events = [_name("process_name", _LINKS, 0, "links")]
    for way, (name, load) in enumerate((("in", run.ingress), ("out", run.egress))):
        for rank in range(count):
            track = 2 * rank + way
            events.append(_name("thread_name", _LINKS, track, f"rank {rank} {name}"))
            share = load[:, rank] / (layer.options.hardware.link_bandwidth * run.step)
            for begin, end in _runs(np.round(share * 20.0)):
                use = float(share[begin:end].mean())
                start = run.start + begin * run.step + offset
                events.append(_span(f"{use * 100:.0f} %", _LINKS, track, start, (end - begin) * run.step, {"use": use}))
    return events


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of stretches of one value other than 0."""
    edges = np.flatnonzero(np.diff(values)) + 1
    begins, ends = np.concatenate([[0], edges]), np.concatenate([edges, [len(values)]])
    return [(int(b), int(e)) for b, e in zip(begins, ends, strict=True) if e > b and values[b] != 0]


def _span(name: str, process: int, thread: int, start: float, length: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start * 1e6, 4),
        "dur": round(length * 1e6, 4),
        "args": args,
    }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
