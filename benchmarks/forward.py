"""Measures the forward on the named shapes A to F beside its peers, in one process: `python -m benchmarks.forward`.

See benchmarks/README.md for what is compared. Numbers are checked before anything is timed; rows go to a CSV file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import moe_megakernel
from moe_megakernel.backends import BACKENDS

from . import host_time
from .driver import DEFAULT, IMPLEMENTATIONS, ROUTINGS, benchmark_shapes, measure_shapes, split, usable
from .layers import COMBINES, Layer, implementation, torch_staged
from .timing import Times, relative_error, time_rounds

#: Relative Frobenius error between two implementations of the layer.
TOLERANCE = 1e-2


def check_numbers(layer: Layer, names: list[str]) -> None:
    """Compares all implementations of the layer with the staged PyTorch one, in each way to combine.

    Raises:
        RuntimeError: two of them differ.
    """
    expected = torch_staged(layer, "mul_sum")
    results = {f"torch_staged ({combine})": torch_staged(layer, combine) for combine in COMBINES}
    results |= {name: layer.forward(name).detach() for name in names if name not in ("torch_staged", "dense")}
    for name, y in results.items():
        error = relative_error(y, expected)
        if not error < TOLERANCE:
            raise RuntimeError(f"forward: {name}: expected a relative error below {TOLERANCE}, got {error:.2e}")
    moe_megakernel.check_errors()


def fastest_combine(layer: Layer) -> str:
    """The combine with which staged PyTorch is fastest on this layer."""
    calls = {name: implementation(layer, "torch_staged", name) for name in COMBINES}
    times = time_rounds(calls, rounds=5, warm_up=1)
    return min(times, key=lambda name: times[name].median)


def measure(layer: Layer, names: list[str], rounds: int, route_share: bool) -> tuple[dict[str, Times], str]:
    """Times of every implementation, and the combine that staged PyTorch took."""
    check_numbers(layer, names)
    combine = fastest_combine(layer) if "torch_staged" in names else ""
    wanted = [*names, "route"] if route_share else names
    times = time_rounds({name: implementation(layer, name, combine) for name in wanted}, rounds)
    moe_megakernel.check_errors()
    return times, combine


def main(
    shapes: Annotated[str, typer.Option(help="Letters, for instance A,D.")] = "A,B,C,D,E,F",
    impls: Annotated[str, typer.Option(help=f"Of {', '.join(IMPLEMENTATIONS)}.")] = DEFAULT,
    routing: Annotated[str, typer.Option(help="uniform or zipf.")] = "uniform",
    rounds: Annotated[int, typer.Option(help="Timed calls of each implementation.", min=1)] = 30,
    commit: Annotated[str, typer.Option(help="Written to the rows.")] = "",
    out: Annotated[Path | None, typer.Option(help="CSV file; by default benchmarks/results/<gpu>/forward.csv.")] = None,
    route_share: Annotated[bool, typer.Option(help="Also time the route alone.")] = False,
    host: Annotated[bool, typer.Option("--host-time", help="Also time the host, on the first shape.")] = False,
) -> None:
    """Time the forward on the named shapes."""
    letters = split(shapes, tuple(benchmark_shapes()), "--shapes")
    split(routing, ROUTINGS, "--routing")
    names = usable(impls, "forward")

    def measure_one(letter: str, layer: Layer) -> tuple[dict[str, Times], str]:
        times, combine = measure(layer, names, rounds, route_share)
        if host and letter == letters[0]:
            typer.echo(host_time.text(host_time.measure(layer, names[0] if names[0] in BACKENDS else "mega")))
        return times, f"torch_staged combines by {combine}" if combine else ""

    measure_shapes("forward", letters, routing, commit, out, measure_one)


if __name__ == "__main__":
    typer.run(main)
