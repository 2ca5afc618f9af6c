"""`moe-megakernel bench`: turns the options into `bench.run.Options` and shows and keeps what comes out.

Under torchrun the batch and the experts are split over its ranks, and rank 0 reports. Exit codes: 0 done, 1 an
implementation failed or was wrong, 2 a wrong option.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from .words import some_of, words

SHAPES = "bench-a,bench-b,bench-c,bench-d,bench-e,bench-f"
IMPLS = "mega,staged,dense,torch_staged,sonic,liger,scattermoe"


def bench(
    shapes: Annotated[str, Option(help="Named shapes; a to f stand for bench-a to bench-f.")] = SHAPES,
    tokens: Annotated[str, Option(help="T of each rank, for instance 2048,8192; by default the shape's own.")] = "",
    routing: Annotated[
        str, Option(help="Some of uniform, zipf, zipf:S, one-hot, file:PATH (.safetensors or .pt with topk_idx).")
    ] = "uniform",
    direction: Annotated[str, Option(help="Some of forward, backward, both.")] = "forward,backward",
    mode: Annotated[str, Option(help="Some of eager, compiled, graph (CUDA graph).")] = "eager",
    impls: Annotated[
        str,
        Option(help="Some of mega, staged, reference, dense, torch_staged, sonic, liger, scattermoe, nccl, deepep."),
    ] = IMPLS,
    rounds: Annotated[int, Option(help="Timed calls of each.", min=1)] = 20,
    cache: Annotated[
        str, Option(help="cold: caches replaced before each call; hot: as the call before left them.")
    ] = "cold",
    memory: Annotated[bool, Option("--memory/--no-memory", help="Also measure saved and peak memory.")] = True,
    host: Annotated[bool, Option("--host/--no-host", help="Also measure the host time of a call.")] = True,
    device: Annotated[str, Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, Option(help="Of values and routes.")] = 0,
    out: Annotated[Path | None, Option(help="CSV file that rows are added to; none by default.")] = None,
    commit: Annotated[str, Option(help="Written to the rows; by default that of the working directory.")] = "",
) -> None:
    """Time the layer beside its peers: numbers checked first, interleaved, in one process."""
    import torch
    from rich.console import Console

    from moe_megakernel.bench import modes, records, table
    from moe_megakernel.bench.peers import IMPLEMENTATIONS
    from moe_megakernel.bench.ranks import rank_group
    from moe_megakernel.bench.routings import parse_routing
    from moe_megakernel.bench.run import Options, run
    from moe_megakernel.shapes import benchmark_shapes, find_shape

    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"expected cuda or cpu, got {device!r}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("expected a CUDA device, got none; there is --device cpu", param_hint="--device")
    if cache not in ("cold", "hot"):
        raise typer.BadParameter(f"expected cold or hot, got {cache!r}", param_hint="--cache")
    letters = {letter.lower(): shape.slug for letter, shape in benchmark_shapes().items()}
    slugs = [letters.get(name, name) for name in words(shapes.lower(), "--shapes")]
    try:
        for slug in slugs:
            find_shape(slug, "bench")
        routings = tuple(parse_routing(word) for word in words(routing, "--routing"))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with rank_group(device) as (group, place):
        options = Options(
            shapes=tuple(slugs),
            tokens=tuple(_number(word) for word in tokens.split(",") if word.strip()),
            routings=routings,
            directions=tuple(some_of(direction, modes.DIRECTIONS, "--direction")),
            modes=tuple(some_of(mode, modes.MODES, "--mode")),
            impls=tuple(some_of(impls, IMPLEMENTATIONS, "--impls")),
            rounds=rounds,
            cold=cache == "cold",
            memory=memory,
            host=host,
            device=place,
            seed=seed,
            commit=commit or records.commit_here(),
            command=shlex.join(["moe-megakernel", *sys.argv[1:]]),
        )
        reports = group is None or group.rank() == 0
        console = Console(width=None if sys.stdout.isatty() else 160)
        failed = False
        try:
            for measured in run(options, group):
                failed |= any(absent.fault for absent in measured.absent)
                if not reports:
                    continue
                for shown in table.make_tables(measured):
                    console.print(shown)
                for absent in measured.absent:
                    console.print(table.absent_text(absent), markup=False, highlight=False)
                if out is not None:
                    records.append_rows(out, measured.rows)
        except ValueError as error:
            typer.echo(error, err=True)
            raise typer.Exit(2) from None
        if reports and out is not None:
            typer.echo(f"rows are in {out}")
    if failed:
        raise typer.Exit(1)


def _number(word: str) -> int:
    if not word.strip().isdigit() or int(word) < 1:
        raise typer.BadParameter(f"expected numbers of tokens, got {word!r}", param_hint="--tokens")
    return int(word)
