"""What the benchmark commands share: named shapes, checks of options, rows of the CSV, and the loop over shapes.

A command hands over what measures one layer (`Measure`); `forward` and `backward` are the commands.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
import typer

from moe_megakernel.backends import available_backends
from moe_megakernel.shapes import SHAPES, Shape

from . import report
from .layers import Layer, make_layer
from .timing import Times

IMPLEMENTATIONS = ("mega", "staged", "torch_staged", "dense", "reference")
DEFAULT = "mega,staged,torch_staged,dense"
ROUTINGS = ("uniform", "zipf")
#: Letter and layer -> times of every implementation, and a note for the terminal.
Measure = Callable[[str, Layer], tuple[dict[str, Times], str]]


def benchmark_shapes() -> dict[str, Shape]:
    """Letter -> shape."""
    prefix = "bench-"
    return {slug.removeprefix(prefix).upper(): shape for slug, shape in SHAPES.items() if slug.startswith(prefix)}


def split(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """Names of a comma-separated list.

    Raises:
        typer.BadParameter: a name is not among the allowed ones.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"expected some of {', '.join(allowed)}, got {name!r}", param_hint=option)
    return names


def usable(impls: str, op: str) -> list[str]:
    """Implementations of a comma-separated list.

    Raises:
        typer.BadParameter: an unknown one, no CUDA device, or a backend that does not run on it.
    """
    names = split(impls, IMPLEMENTATIONS, "--impls")
    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{op}: device: expected a CUDA device, got none")
    reasons = available_backends("cuda", torch.cuda.get_device_capability())
    for name in names:
        if reasons.get(name):
            raise typer.BadParameter(f"{op}: {name}: expected a usable backend, got {reasons[name]}")
    return names


def make_rows(
    letter: str, shape: Shape, direction: str, routing: str, commit: str, times: dict[str, Times]
) -> list[report.Row]:
    """One row for each implementation; "route" has no useful operations."""
    assert shape.tokens is not None
    flops = shape.flops(shape.tokens, direction)
    given = report.origin(letter, shape, commit)
    rows = []
    for name, spent in times.items():
        useful = 0.0 if name == "route" else flops / spent.median / 1e9
        against = times["dense"].median / spent.median if "dense" in times and name != "route" else 0.0
        rows.append(
            report.Row(
                **given,
                ranks=1,
                routing=routing,
                direction=direction,
                impl=name,
                ms_median=spent.median,
                ms_min=spent.least,
                ms_max=spent.most,
                tflops=useful,
                ratio_dense=against,
            )
        )
    return rows


def measure_shapes(
    direction: str, letters: list[str], routing: str, commit: str, out: Path | None, measure: Measure
) -> None:
    """Measures every shape, appends its rows to the CSV file and shows all of them."""
    known = benchmark_shapes()
    path = report.default_path(direction) if out is None else out
    rows: list[report.Row] = []
    for letter in letters:
        layer = make_layer(known[letter], routing)
        times, note = measure(letter, layer)
        new = make_rows(letter, layer.shape, direction, routing, commit, times)
        report.append(path, new)
        rows += new
        typer.echo(f"{letter}: done" + (f"; {note}" if note else ""))
        del layer
        gc.collect()
        torch.cuda.empty_cache()
    report.print_table(rows)
    typer.echo(f"rows are in {path}")
