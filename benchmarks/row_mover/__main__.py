"""Measures the row mover alone, pull against push: `python -m benchmarks.row_mover --ranks 4`.

See benchmarks/README.md. Every row is checked before anything is timed; rows go to a CSV file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moe_megakernel.bench.records import Machine, append_rows
from moe_megakernel.cli.words import some_of

from .. import report
from ..group import require_gpu, run_ranks, sharing
from .library import DEFAULT, MAX_RANKS, MAX_WARPS, Library
from .moves import DIRECTIONS, ROUTINGS
from .worker import Config, Found, measure


@dataclass(frozen=True)
class Row(Machine):
    """One direction. T: of every rank; sharing: own, mps or slices; blocks: of a rank; rows, rows_busiest: of all ranks
    and of the one that receives most; gb_per_s: of all ranks together, each row counted once, and of the busiest rank;
    pull_over_push: rate of pull over that of push, on both.
    """

    ranks: int
    sharing: str
    T: int
    H: int
    E: int
    K: int
    routing: str
    cache: str
    blocks: int
    warps: int
    rows: int
    rows_busiest: int
    remote_share: float
    direction: str
    ms_median: float
    ms_min: float
    ms_max: float
    gb_per_s: float
    gb_per_s_busiest: float
    pull_over_push: float


def make_rows(machine: dict[str, str], ranks: int, how: str, config: Config, found: Found) -> list[Row]:
    """One row for each direction."""
    row_bytes = 2 * config.hidden
    ratio = found.times["push"].median / found.times["pull"].median
    return [
        Row(
            **machine,
            ranks=ranks,
            sharing=how,
            T=config.tokens,
            H=config.hidden,
            E=config.num_experts,
            K=config.top_k,
            routing=found.routing,
            cache="cold" if config.cold else "hot",
            blocks=found.blocks,
            warps=found.warps,
            rows=found.rows,
            rows_busiest=found.rows_busiest,
            remote_share=found.remote_share,
            direction=direction,
            ms_median=found.times[direction].median,
            ms_min=found.times[direction].least,
            ms_max=found.times[direction].most,
            gb_per_s=found.rows * row_bytes / found.times[direction].median / 1e6,
            gb_per_s_busiest=found.rows_busiest * row_bytes / found.times[direction].median / 1e6,
            pull_over_push=ratio,
        )
        for direction in DIRECTIONS
    ]


def text(row: Row) -> str:
    """A line for the terminal."""
    return (
        f"{row.routing}, {row.blocks} blocks of {row.warps} warps a rank, {row.direction}: {row.gb_per_s:.0f} GB/s "
        f"({row.ms_median:.3f} ms, {row.ms_min:.3f} to {row.ms_max:.3f}), busiest rank {row.gb_per_s_busiest:.0f}; "
        f"pull/push {row.pull_over_push:.2f}"
    )


def main(
    ranks: Annotated[int, typer.Option(help="Processes.", min=1, max=MAX_RANKS)] = 4,
    tokens: Annotated[int, typer.Option(help="T of every rank.", min=1)] = 8192,
    hidden: Annotated[int, typer.Option(help="H, a multiple of 8.", min=8)] = 2048,
    experts: Annotated[int, typer.Option(help="E, of all ranks.", min=1)] = 128,
    top_k: Annotated[int, typer.Option(help="K.", min=1)] = 8,
    routing: Annotated[str, typer.Option(help="Of uniform, zipf.")] = "uniform,zipf",
    warps: Annotated[str, typer.Option(help="Warps of a block: 1 as in the fused kernel, 6 as in the staged.")] = "1,6",
    blocks: Annotated[int, typer.Option(help="Of a rank; 0: SMs / ranks on a shared GPU, else all SMs.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="Timed launches of each direction.", min=1)] = 20,
    cold: Annotated[bool, typer.Option("--cold/--hot", help="Replace what caches hold before each launch.")] = True,
    mps: Annotated[bool, typer.Option("--mps/--no-mps", help="Start MPS where ranks share a GPU.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds after which a launch gives up.", min=0.1)] = 5.0,
    library: Annotated[Path, typer.Option(help="Built from row_mover.cu.")] = DEFAULT,
    commit: Annotated[str, typer.Option(help="Written to the rows.")] = "",
    out: Annotated[Path | None, typer.Option(help="CSV; by default benchmarks/results/<gpu>/row_mover.csv.")] = None,
) -> None:
    """Time both directions of the row mover."""
    if hidden % 8:
        raise typer.BadParameter(f"expected a multiple of 8, got {hidden}", param_hint="--hidden")
    Library(library)  # says how to build it, once
    counts = some_of(warps, tuple(str(n) for n in range(1, MAX_WARPS + 1)), "--warps")
    config = Config(
        tokens=tokens,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        routings=tuple(some_of(routing, ROUTINGS, "--routing")),
        warps=tuple(int(n) for n in counts),
        blocks=blocks,
        rounds=rounds,
        cold=cold,
        timeout=timeout,
        library=library.resolve(),
    )
    require_gpu()
    with sharing(ranks, mps) as how:
        machine, results = run_ranks(measure, ranks, config, commit, limit=540.0)
    path = report.default_path("row_mover", machine["gpu"]) if out is None else out
    for found in results:
        rows = make_rows(machine, ranks, how, config, found)
        append_rows(path, rows)
        for row in rows:
            typer.echo(text(row))
    typer.echo(f"rows are in {path}")


if __name__ == "__main__":
    typer.run(main)
