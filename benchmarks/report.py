"""What a run leaves behind: rows of a CSV file that say where and when they were measured, and a table to read."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moe_megakernel.shapes import Shape

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Machine:
    """Where and when something was measured: the first columns of every file."""

    gpu: str
    driver: str
    torch: str
    date: str
    commit: str


@dataclass(frozen=True)
class Origin(Machine):
    """The same, and on which named shape."""

    shape: str
    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int


@dataclass(frozen=True)
class Row(Origin):
    """One implementation of one shape. tflops: of 6 T K H I operations forward, 12 T K H I backward; ratio_dense: over
    that of dense.
    """

    ranks: int
    routing: str
    direction: str
    impl: str
    ms_median: float
    ms_min: float
    ms_max: float
    tflops: float
    ratio_dense: float


def gpu_name() -> str:
    """Of the current device, as a word: `NVIDIA H200` is h200."""
    return torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")


def driver_version() -> str:
    """As nvidia-smi says it, or an empty string."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[0] if found else ""


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def machine(commit: str) -> dict[str, str]:
    """The fields of `Machine`, now and here."""
    versions = {"driver": driver_version(), "torch": torch.__version__}
    return {"gpu": gpu_name(), **versions, "date": today(), "commit": commit}


def named_shape(letter: str, shape: Shape) -> dict[str, Any]:
    """What `Origin` has beside `Machine`."""
    sizes = {"T": shape.tokens, "H": shape.hidden, "I": shape.width, "E": shape.num_experts, "K": shape.top_k}
    return {"shape": letter, **sizes}


def origin(letter: str, shape: Shape, commit: str) -> dict[str, Any]:
    """The fields of `Origin` for a measurement of a shape, now and here."""
    return machine(commit) | named_shape(letter, shape)


def default_path(name: str, gpu: str | None = None) -> Path:
    """Of the current device's results, or those of `gpu`, a word of `gpu_name`."""
    return ROOT / "results" / (gpu_name() if gpu is None else gpu) / f"{name}.csv"


def append(path: Path, rows: Sequence[Any]) -> None:
    """Adds rows, dataclasses of one kind, to the file, with a heading where it is new."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
            writer.writerow(rounded)


def print_table(rows: list[Row]) -> None:
    """TFLOP/s of each implementation, and how mega stands against the others."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    impls = [name for name in dict.fromkeys(row.impl for row in rows) if name != "route"]
    by_place = {(row.shape, row.impl): row for row in rows}
    ratios = [name for name in ("torch_staged", "staged", "dense") if name in impls and "mega" in impls]
    routed = any(row.impl == "route" for row in rows)
    table = Table(title=f"{rows[0].direction}, {rows[0].routing} routing, {rows[0].gpu}: TFLOP/s (ms)")
    for heading in ("shape", *impls, *(f"mega/{name}" for name in ratios), *(["route/mega"] if routed else [])):
        table.add_column(heading, justify="left" if heading == "shape" else "right")
    for shape in shapes:
        cells = [shape]
        for name in impls:
            row = by_place.get((shape, name))
            cells.append("-" if row is None else f"{row.tflops:.0f} ({row.ms_median:.3f})")
        mega = by_place.get((shape, "mega"))
        for name in ratios:
            row = by_place.get((shape, name))
            cells.append("-" if row is None or mega is None else f"{row.ms_median / mega.ms_median:.2f}")
        if routed:
            row = by_place.get((shape, "route"))
            cells.append("-" if row is None or mega is None else f"{row.ms_median / mega.ms_median:.1%}")
        table.add_row(*cells)
    Console(width=160).print(table)
