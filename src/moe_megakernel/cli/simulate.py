"""`moe-megakernel simulate`: turns the options into a simulation and prints or writes what it says.

The work is in `moe_megakernel.simulate`. Exit codes: 0 done, 1 without the native library, 2 a wrong option.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

_SHAPES = "A named shape: kimi-k2, glm-5.2, qwen3.5-397b, deepseek-v4-pro, qwen3-30b, mixtral-8x7b, bench-a to bench-f."


def simulate(
    shape: Annotated[str, Option(help=_SHAPES)] = "kimi-k2",
    ranks: Annotated[int, Option(help="GPUs of the group, W.")] = 8,
    hardware: Annotated[str, Option(help="h200, gb200 or gb300.")] = "h200",
    tokens: Annotated[int, Option(help="Tokens of each rank, T; -1: the shape's own, else 2048.")] = -1,
    dtype: Annotated[str, Option(help="Operands: bf16 or fp8.")] = "bf16",
    direction: Annotated[str, Option(help="forward, backward or both.")] = "forward",
    routing: Annotated[str, Option(help="uniform, or zipf:S with the exponent S.")] = "uniform",
    order: Annotated[str, Option(help="separate, unlagged, lagged or sm-split.")] = "lagged",
    transport: Annotated[str, Option(help="How rows reach experts: pull or push.")] = "pull",
    comm_sms: Annotated[int, Option(help="SMs that only move rows; 0: spare warps; -1: the order's default.")] = -1,
    minibatch_rows: Annotated[int, Option(help="Rows of a minibatch; -1: two waves of gate_up tasks.")] = -1,
    seed: Annotated[int, Option(help="Of the drawn routing.")] = 0,
    compare: Annotated[bool, Option("--compare", help="Simulate all orders, and pull against push.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
    trace: Annotated[Path | None, Option(help="Write a Chrome trace, for ui.perfetto.dev.")] = None,
    png: Annotated[Path | None, Option(help="Write a picture of the time line of the slowest rank.")] = None,
    memory_map: Annotated[Path | None, Option(help="Write a picture of a rank's workspace.")] = None,
) -> None:
    """Simulate one layer on a group of GPUs: time, exposed communication, utilisation, time line."""
    from moe_megakernel.simulate import SimulateError, make_options

    try:
        for name, path in (("trace", trace), ("png", png), ("memory-map", memory_map)):
            if path is not None and not path.absolute().parent.is_dir():
                raise SimulateError(name, "a file in a folder that exists", path)
            if path is not None and compare:
                raise SimulateError(name, "no file with --compare", path)
        options = make_options(
            shape,
            hardware,
            ranks=ranks,
            tokens=tokens,
            dtype=dtype,
            direction=direction,
            routing=routing,
            order=order,
            transport=transport,
            comm_sms=comm_sms,
            minibatch_rows=minibatch_rows,
            seed=seed,
        )
    except SimulateError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None
    from moe_megakernel import _native

    if not _native.load():
        typer.echo(f"simulate: native library: expected it loaded, got {_native.why_missing()}", err=True)
        raise typer.Exit(1)
    if compare:
        _compare(options, as_json)
    else:
        _simulate(options, as_json, trace, png)
    if memory_map is not None:
        from moe_megakernel.simulate.memory_map import write_memory_map

        write_memory_map(options, memory_map)


def _simulate(options: object, as_json: bool, trace: Path | None, png: Path | None) -> None:
    from moe_megakernel.simulate import Options, simulate
    from moe_megakernel.simulate.report import print_report, to_json

    assert isinstance(options, Options)
    layers = simulate(options, record=trace is not None or png is not None)
    if as_json:
        typer.echo(json.dumps(to_json(layers), indent=2))
    else:
        print_report(layers, Console())
    if trace is not None:
        from moe_megakernel.simulate.trace import write_trace

        write_trace(layers, trace)
    if png is not None:
        from moe_megakernel.simulate.picture import write_picture

        write_picture(layers, png)


def _compare(options: object, as_json: bool) -> None:
    from moe_megakernel.simulate import Options
    from moe_megakernel.simulate.compare import compare, print_comparison

    assert isinstance(options, Options)
    results = compare(options)
    if as_json:
        typer.echo(json.dumps({"schema": 1, "compared": results}, indent=2))
    else:
        print_comparison(options, results, Console())
