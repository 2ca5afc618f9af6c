"""`moe-megakernel profile`: reads traces of torch.profiler and prints, or writes, what they say.

The work is in `moe_megakernel.profiling`. Exit codes: 0 done, 1 a file that is no usable trace, 2 a wrong option,
130 interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from typer import Option


def profile(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces (.json, .json.gz), or folders of them.")
    ],
    as_json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.")] = False,
    png: Annotated[Path | None, Option(help="Write a picture of the time lines.")] = None,
    rules: Annotated[Path | None, Option(help="JSON file of rules to put in front of the shipped ones.")] = None,
) -> None:
    """Analyse traces of torch.profiler: exposed communication, idle time and its cause, the MoE layer's share."""
    from moe_megakernel.profiling import ProfileError, analyse_files, load_rules

    try:
        if png is not None and not png.absolute().parent.is_dir():
            raise ProfileError("--png", "a file in a folder that exists", png, exit_code=2)
        known = load_rules(rules)
        with _bar() as bar:
            report = analyse_files(traces, known, _advance(bar))
    except ProfileError as error:
        typer.echo(error, err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("profile: interrupted", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        from moe_megakernel.profiling.tables import print_report

        print_report(report, Console())
    if png is not None:
        from moe_megakernel.profiling.picture import write_picture

        write_picture(report, png)


def _bar() -> Progress:
    """On standard error, so that --json can be piped, and on a terminal only."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True)


def _advance(bar: Progress) -> Callable[[Path, int, int], None]:
    tasks: dict[Path, TaskID] = {}

    def advance(path: Path, read: int, size: int) -> None:
        if path not in tasks:
            tasks[path] = bar.add_task(path.name, total=size)
        bar.update(tasks[path], completed=read)

    return advance
