"""What a simulation says, as plain JSON types and as tables for people.

Called by the command line; owns the names of the JSON fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moe_megakernel.plan_names import Counter

from .layer import Layer

SCHEMA = 1  # of the JSON; raised when a field changes its meaning or goes


def to_json(layers: list[Layer]) -> dict[str, Any]:
    """The whole report: what was simulated, each direction, and their sum."""
    options = layers[0].options
    return {
        "schema": SCHEMA,
        "shape": {
            "slug": options.shape.slug,
            "num_experts": options.shape.num_experts,
            "hidden": options.shape.hidden,
            "width": options.shape.width,
            "top_k": options.shape.top_k,
        },
        "hardware": options.hardware.slug,
        "ranks": options.ranks,
        "tokens": options.tokens,
        "dtype": options.dtype,
        "routing": options.routing,
        "seed": options.seed,
        "order": options.order,
        "transport": options.transport,
        "directions": [describe(layer) for layer in layers],
        "layer_ms": sum(float(layer.run.ends.max()) * 1e3 for layer in layers),
    }


def describe(layer: Layer) -> dict[str, Any]:
    """One direction. Times in milliseconds, shares between 0 and 1."""
    run, options, costs = layer.run, layer.options, layer.costs
    total = float(run.ends.max())
    sms, comm_sms = options.hardware.sms, options.communication_sms(layer.direction)
    busy = np.array([rank.busy for rank in run.ranks]) / costs.clusters / total
    flops = options.shape.flops(options.tokens, layer.direction) / total
    datasheet = options.hardware.bf16_flops if options.dtype == "bf16" else options.hardware.fp8_flops
    rows = np.array([stream.rows for stream in layer.streams])
    wires = options.hardware.link_bandwidth * total
    return {
        "direction": layer.direction,
        "layer_ms": total * 1e3,
        "exposed_communication": None if np.isnan(layer.exposed) else layer.exposed,
        "tflops_per_gpu": flops / 1e12,
        "tensor_utilisation": flops / datasheet,
        "busy": {"min": float(busy.min()), "mean": float(busy.mean()), "max": float(busy.max())},
        "waiting": _waiting(layer, total),
        "sms": {"compute": costs.clusters * 2, "communication": comm_sms, "idle": sms - comm_sms - costs.clusters * 2},
        "rows": {"min": int(rows.min()), "mean": float(rows.mean()), "max": int(rows.max())},
        "minibatches": int(layer.streams[int(rows.argmax())].num_minibatches),
        "dispatch_end_ms": _spread(run.dispatch_end),
        "compute_end_ms": _spread(np.array([rank.end for rank in run.ranks])),
        "home_end_ms": _spread(run.home_end),
        "rank_end_ms": _spread(run.ends),
        "combine_ms": costs.combine_seconds(options.tokens) * 1e3,
        "link_use": {
            "egress": _use(run.egress.sum(axis=0), wires),
            "ingress": _use(run.ingress.sum(axis=0), wires),
        },
        "step_us": run.step * 1e6,
    }


def _spread(seconds: np.ndarray) -> dict[str, float]:
    ms = seconds * 1e3
    return {"min": float(ms.min()), "median": float(np.median(ms)), "max": float(ms.max())}


def _use(bytes_: np.ndarray, wires: float) -> dict[str, float]:
    return {"mean": float(bytes_.mean() / wires), "max": float(bytes_.max() / wires)}


def _waiting(layer: Layer, total: float) -> dict[str, float]:
    """Shares of the clusters' time in the layer spent waiting, by the counter waited for; mean over ranks."""
    waited = np.mean([rank.waited for rank in layer.run.ranks], axis=0) / layer.costs.clusters / total
    return {counter.name.lower(): float(waited[counter]) for counter in Counter if waited[counter] > 0}


def print_report(layers: list[Layer], console: Console) -> None:
    """One table: a column for each direction."""
    options = layers[0].options
    spread = f"{options.ranks} x {options.hardware.name}, {options.tokens} tokens a rank, {options.dtype}"
    console.print(f"{options.shape.name}: {spread}, {options.routing} routing", highlight=False)
    console.print(f"order {options.order}: {options.how.summary}", highlight=False)
    said = [describe(layer) for layer in layers]
    table = Table("", *(one["direction"] for one in said))
    for label, cell in _LINES:
        table.add_row(label, *(cell(one) for one in said))
    console.print(table)
    if len(said) > 1:
        console.print(f"Together {sum(one['layer_ms'] for one in said):.3f} ms", highlight=False)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _range(spread: dict[str, float]) -> str:
    return f"{spread['min']:.3f} / {spread['median']:.3f} / {spread['max']:.3f}"


_LINES = (
    ("layer time, ms", lambda one: f"{one['layer_ms']:.3f}"),
    ("exposed communication", lambda one: _percent(one["exposed_communication"])),
    ("TFLOP/s a GPU", lambda one: f"{one['tflops_per_gpu']:.0f}"),
    ("share of the datasheet's rate", lambda one: _percent(one["tensor_utilisation"])),
    ("clusters busy, mean", lambda one: _percent(one["busy"]["mean"])),
    ("clusters waiting", lambda one: ", ".join(f"{k} {_percent(v)}" for k, v in one["waiting"].items()) or "never"),
    (
        "rows a rank, min / mean / max",
        lambda one: f"{one['rows']['min']} / {one['rows']['mean']:.0f} / {one['rows']['max']}",
    ),
    ("minibatches", lambda one: str(one["minibatches"])),
    ("dispatch ends, ms, min / median / max", lambda one: _range(one["dispatch_end_ms"])),
    ("compute ends, ms, min / median / max", lambda one: _range(one["compute_end_ms"])),
    ("rows are home, ms, min / median / max", lambda one: _range(one["home_end_ms"])),
    ("ranks end, ms, min / median / max", lambda one: _range(one["rank_end_ms"])),
    (
        "links in use, in / out, mean",
        lambda one: f"{_percent(one['link_use']['ingress']['mean'])} / {_percent(one['link_use']['egress']['mean'])}",
    ),
)
