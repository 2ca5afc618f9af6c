"""What a run leaves behind: rows of a CSV file that say where and when they were measured."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from moe_megakernel.bench import records
from moe_megakernel.shapes import SHAPES, Shape

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


def machine(commit: str) -> dict[str, str]:
    """The fields of `Machine`, now and here."""
    found = records.origin(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit, "")
    return {field.name: found[field.name] for field in fields(Machine)}


def benchmark_shapes() -> dict[str, Shape]:
    """Letter -> shape."""
    prefix = "bench-"
    return {slug.removeprefix(prefix).upper(): shape for slug, shape in SHAPES.items() if slug.startswith(prefix)}


def named_shape(letter: str, shape: Shape) -> dict[str, Any]:
    """What `Origin` has beside `Machine`."""
    sizes = {"T": shape.tokens, "H": shape.hidden, "I": shape.width, "E": shape.num_experts, "K": shape.top_k}
    return {"shape": letter, **sizes}


def default_path(name: str, gpu: str) -> Path:
    """Of the results of a GPU, a word of `records.gpu_word`."""
    return ROOT / "results" / gpu / f"{name}.csv"


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
