"""Measures what it costs to split one batch over several ranks of one GPU: `python -m benchmarks.ranks --ranks 4`.

See benchmarks/README.md. The bits of y and of all gradients are compared with one rank's before anything is timed; rows
go to a CSV file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moe_megakernel.backends import BACKENDS, TRANSPORTS
from moe_megakernel.bench.records import Origin, append_rows
from moe_megakernel.cli.words import some_of
from moe_megakernel.shapes import benchmark_shapes

from . import report
from .group import require_gpu, run_ranks, sharing
from .rank_steps import CACHES, Config, Found, measure
from .row_mover.moves import ROUTINGS

#: What all ranks may take of one rank's time.
TARGET = 1.10


@dataclass(frozen=True)
class Row(Origin):
    """T: of all ranks together; sharing: mps or slices; steps: of a sample, back to back; sms: of a rank; ms: a step of
    all ranks, from a common start to the end of the last; own_sms: each rank has SMs of its own; rest: seconds before a
    sample; single_ms: of one rank with ranks * sms; ratio: ms over
    single_ms; apart_ms, apart_ratio: the same of ranks that each run a layer of their own of the same size, at once.
    """

    ranks: int
    sharing: str
    routing: str
    direction: str
    impl: str
    transport: str
    cache: str
    steps: int
    sms: int
    own_sms: bool
    rest: float
    ms_median: float
    ms_min: float
    ms_max: float
    single_ms_median: float
    single_ms_min: float
    single_ms_max: float
    ratio: float
    apart_ms_median: float
    apart_ratio: float


def make_row(machine: dict[str, str], ranks: int, how: str, config: Config, found: Found) -> Row:
    """The row of one measurement."""
    several, single = found.several, found.single
    return Row(
        **(machine | report.named_shape(found.letter, benchmark_shapes()[found.letter])),
        ranks=ranks,
        sharing=how,
        routing=config.routing,
        direction=found.direction,
        impl=config.backend,
        transport=config.transport,
        cache=found.cache,
        steps=found.steps,
        sms=found.sms,
        own_sms=config.own_sms,
        rest=config.rest,
        ms_median=several.median,
        ms_min=several.least,
        ms_max=several.most,
        single_ms_median=single.median,
        single_ms_min=single.least,
        single_ms_max=single.most,
        ratio=several.median / single.median,
        apart_ms_median=found.apart.median,
        apart_ratio=found.apart.median / single.median,
    )


def text(row: Row) -> str:
    """A line for the terminal."""
    return (
        f"{row.shape}, {row.direction}, {row.cache}: {row.ranks} ranks of {row.sms} SMs {row.ms_median:.3f} ms "
        f"({row.ms_min:.3f} to {row.ms_max:.3f}), one of {row.ranks * row.sms} {row.single_ms_median:.3f} ms "
        f"({row.single_ms_min:.3f} to {row.single_ms_max:.3f}): {row.ratio:.3f}, "
        f"{'within' if row.ratio <= TARGET else 'above'} {TARGET:.2f}; "
        f"layers of their own {row.apart_ms_median:.3f} ms, {row.apart_ratio:.3f}"
    )


def total_text(rows: list[Row]) -> list[str]:
    """A line for each shape and state of the caches: forward and backward together."""
    lines = []
    for name, cache in dict.fromkeys((row.shape, row.cache) for row in rows):
        both = [row for row in rows if (row.shape, row.cache) == (name, cache)]
        together, single, apart = (
            sum(getattr(row, field) for row in both) for field in ("ms_median", "single_ms_median", "apart_ms_median")
        )
        what = f"{name}, {cache}, {' and '.join(row.direction for row in both)}"
        verdict = "within" if together / single <= TARGET else "above"
        lines.append(
            f"{what}: {together:.3f} ms over {single:.3f} ms: {together / single:.3f}, {verdict} {TARGET:.2f}; "
            f"over layers of their own {together / apart:.3f}"
        )
    return lines


def main(
    ranks: Annotated[int, typer.Option(help="Processes, all on the first GPU.", min=2)] = 4,
    shapes: Annotated[str, typer.Option(help="Letters, for instance A,D.")] = "A,D",
    routing: Annotated[str, typer.Option(help="uniform or zipf.")] = "uniform",
    backend: Annotated[str, typer.Option(help="Of the layer.")] = "mega",
    transport: Annotated[str, typer.Option(help="Of the layer.")] = "peer",
    cache: Annotated[str, typer.Option(help="cold: one step at a time; hot: several back to back.")] = "cold,hot",
    rounds: Annotated[int, typer.Option(help="Samples of each.", min=1)] = 15,
    steps: Annotated[int, typer.Option(help="Of a sample where caches are hot.", min=1)] = 10,
    own_sms: Annotated[
        bool, typer.Option("--own-sms/--no-own-sms", help="SMs of its own for each rank, by CUDA green contexts.")
    ] = True,
    rest: Annotated[float, typer.Option(help="Seconds without work before each sample.", min=0.0)] = 0.03,
    mps: Annotated[bool, typer.Option("--mps/--no-mps", help="Start MPS, unless the environment names one.")] = True,
    commit: Annotated[str, typer.Option(help="Written to the rows.")] = "",
    out: Annotated[Path | None, typer.Option(help="CSV file; by default benchmarks/results/<gpu>/ranks.csv.")] = None,
) -> None:
    """Time ranks that share a GPU beside one rank."""
    for value, allowed, option in (
        (routing, ROUTINGS, "--routing"),
        (backend, BACKENDS, "--backend"),
        (transport, TRANSPORTS, "--transport"),
    ):
        if value not in allowed:
            raise typer.BadParameter(f"expected one of {', '.join(allowed)}, got {value!r}", param_hint=option)
    config = Config(
        letters=tuple(some_of(shapes, benchmark_shapes(), "--shapes")),
        routing=routing,
        backend=backend,
        transport=transport,
        caches=tuple(some_of(cache, CACHES, "--cache")),
        rounds=rounds,
        steps=steps,
        own_sms=own_sms,
        rest=rest,
    )
    require_gpu()
    with sharing(ranks, mps, gpus=1) as how:
        machine, results = run_ranks(measure, ranks, config, commit, limit=570.0, gpus=1)
    path = report.default_path("ranks", machine["gpu"]) if out is None else out
    rows = [make_row(machine, ranks, how, config, found) for found in results]
    append_rows(path, rows)
    for row in rows:
        typer.echo(text(row))
    for line in total_text(rows):
        typer.echo(line)
    typer.echo(f"rows are in {path}")


if __name__ == "__main__":
    typer.run(main)
