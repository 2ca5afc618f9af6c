"""Measures the forward on the named shapes A to F beside its peers, in one process: `python -m benchmarks.forward`.

See benchmarks/README.md for what is compared. Numbers are checked before anything is timed; rows go to a CSV file.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer

import moe_megakernel
from moe_megakernel.backends import available_backends
from moe_megakernel.shapes import SHAPES, Shape

from . import host_time, report
from .layers import COMBINES, Layer, implementation, make_layer, torch_staged
from .timing import Times, relative_error, time_rounds

IMPLEMENTATIONS = ("mega", "staged", "torch_staged", "dense", "reference")
DEFAULT = "mega,staged,torch_staged,dense"
#: Relative Frobenius error between two implementations of the layer.
TOLERANCE = 1e-2


def benchmark_shapes() -> dict[str, Shape]:
    """Letter -> shape."""
    prefix = "bench-"
    return {slug.removeprefix(prefix).upper(): shape for slug, shape in SHAPES.items() if slug.startswith(prefix)}


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


def make_rows(letter: str, layer: Layer, routing: str, commit: str, times: dict[str, Times]) -> list[report.Row]:
    shape = layer.shape
    assert shape.tokens is not None
    flops = shape.flops(shape.tokens)
    rows = []
    for name, spent in times.items():
        useful = 0.0 if name == "route" else flops / spent.median / 1e9
        against = times["dense"].median / spent.median if "dense" in times and name != "route" else 0.0
        rows.append(
            report.Row(
                gpu=report.gpu_name(),
                driver=report.driver_version(),
                torch=torch.__version__,
                date=report.today(),
                commit=commit,
                shape=letter,
                T=shape.tokens,
                H=shape.hidden,
                I=shape.width,
                E=shape.num_experts,
                K=shape.top_k,
                ranks=1,
                routing=routing,
                direction="forward",
                impl=name,
                ms_median=spent.median,
                ms_min=spent.least,
                ms_max=spent.most,
                tflops=useful,
                ratio_dense=against,
            )
        )
    return rows


def split(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"expected some of {', '.join(allowed)}, got {name!r}", param_hint=option)
    return names


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
    known = benchmark_shapes()
    letters = split(shapes, tuple(known), "--shapes")
    names = split(impls, IMPLEMENTATIONS, "--impls")
    split(routing, ("uniform", "zipf"), "--routing")
    if not torch.cuda.is_available():
        raise typer.BadParameter("forward: device: expected a CUDA device, got none")
    reasons = available_backends("cuda", torch.cuda.get_device_capability())
    for name in names:
        if reasons.get(name):
            raise typer.BadParameter(f"forward: {name}: expected a usable backend, got {reasons[name]}")
    path = report.default_path() if out is None else out
    rows: list[report.Row] = []
    for letter in letters:
        layer = make_layer(known[letter], routing)
        times, combine = measure(layer, names, rounds, route_share)
        new = make_rows(letter, layer, routing, commit, times)
        report.append(path, new)
        rows += new
        typer.echo(f"{letter}: done" + (f"; torch_staged combines by {combine}" if combine else ""))
        if host and letter == letters[0]:
            typer.echo(host_time.text(host_time.measure(layer, names[0] if names[0] in reasons else "mega")))
        del layer
        gc.collect()
        torch.cuda.empty_cache()
    report.print_table(rows)
    typer.echo(f"rows are in {path}")


if __name__ == "__main__":
    typer.run(main)
