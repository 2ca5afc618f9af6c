"""Measures the backward on the named shapes A to F beside its peers, in one process: `python -m benchmarks.backward`.

The mirror of `forward`. Numbers are checked before anything is timed; times go to one CSV file, memory to another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import moe_megakernel

from . import memory, report
from .driver import DEFAULT, IMPLEMENTATIONS, ROUTINGS, benchmark_shapes, measure_shapes, split, usable
from .gradients import COMBINES, NAMES, dense, make_dy, make_step
from .layers import Call, Layer
from .timing import Times, relative_error, time_rounds

#: Relative Frobenius error between the gradients of two implementations, each of which rounds at places of its own.
TOLERANCE = 2e-2


def check_numbers(layer: Layer, names: list[str], dy: Tensor) -> None:
    """Compares all gradients of all implementations with those of the staged PyTorch one, in each way to combine.

    Raises:
        RuntimeError: two of them differ.
    """
    expected = make_step(layer, "torch_staged", "mul_sum", dy).gradients()
    kinds = [("torch_staged", combine) for combine in COMBINES]
    kinds += [(name, "") for name in names if name not in ("torch_staged", "dense")]
    for name, combine in kinds:
        found = make_step(layer, name, combine, dy).gradients()
        for what, actual, want in zip(NAMES, found, expected, strict=True):
            error = relative_error(actual.flatten(0, -2), want.flatten(0, -2))
            if not error < TOLERANCE:
                raise RuntimeError(
                    f"backward: {name} {combine}: {what}: expected a relative error below {TOLERANCE}, got {error:.2e}"
                )
    moe_megakernel.check_errors()


def backward_call(layer: Layer, name: str, combine: str, dy: Tensor) -> Call:
    """The backward alone: the forward has run, and its graph is kept from call to call."""
    if name == "dense":
        return dense(layer)
    step = make_step(layer, name, combine, dy)
    return lambda: step.gradients()[0]


def fastest_combine(layer: Layer, dy: Tensor) -> str:
    """The combine with whose backward staged PyTorch is fastest on this layer."""
    calls = {name: backward_call(layer, "torch_staged", name, dy) for name in COMBINES}
    times = time_rounds(calls, rounds=5, warm_up=1)
    return min(times, key=lambda name: times[name].median)


def measure(layer: Layer, names: list[str], rounds: int) -> tuple[dict[str, Times], dict[str, memory.Memory], str]:
    """Times and memory of every implementation, and the combine that staged PyTorch took."""
    dy = make_dy(layer)
    check_numbers(layer, names, dy)
    combine = fastest_combine(layer, dy) if "torch_staged" in names else ""
    steps = {name: memory.measure(layer, name, combine, dy) for name in names if name != "dense"}
    times = time_rounds({name: backward_call(layer, name, combine, dy) for name in names}, rounds)
    moe_megakernel.check_errors()
    return times, steps, combine


def main(
    shapes: Annotated[str, typer.Option(help="Letters, for instance A,D.")] = "A,B,C,D,E,F",
    impls: Annotated[str, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}.")] = DEFAULT,
    routing: Annotated[str, typer.Option(help="uniform or zipf.")] = "uniform",
    rounds: Annotated[int, typer.Option(help="Timed calls of each implementation.", min=1)] = 30,
    commit: Annotated[str, typer.Option(help="Written to the rows.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="CSV file; by default benchmarks/results/<gpu>/backward.csv.")
    ] = None,
    memory_out: Annotated[Path | None, typer.Option(help="CSV file of the memory; memory.csv beside it.")] = None,
) -> None:
    """Time the backward on the named shapes."""
    letters = split(shapes, tuple(benchmark_shapes()), "--shapes")
    split(routing, ROUTINGS, "--routing")
    names = usable(impls, "backward")

    def measure_one(letter: str, layer: Layer) -> tuple[dict[str, Times], str]:
        times, steps, combine = measure(layer, names, rounds)
        for name, found in steps.items():
            typer.echo(f"{letter}: {memory.text(name, found)}")
        if memory_out is not None:
            path = memory_out
        else:
            path = report.default_path("memory") if out is None else out.with_name("memory.csv")
        report.append(path, [memory.make_row(letter, layer, commit, name, found) for name, found in steps.items()])
        torch.cuda.empty_cache()
        return times, f"torch_staged combines by {combine}" if combine else ""

    measure_shapes("backward", letters, routing, commit, out, measure_one)


if __name__ == "__main__":
    typer.run(main)
