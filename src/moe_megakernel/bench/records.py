"""Rows of the benchmark's CSV files: what was measured, where, when, from which commit and by which command."""

from __future__ import annotations

import csv
import functools
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """Where and when something was measured: the first columns of every file. gpu: a word, for instance h200."""

    gpu: str
    driver: str
    torch: str
    date: str
    commit: str


@dataclass(frozen=True)
class Origin(Machine):
    """The same, and on which named shape. T: tokens of a rank, or of all ranks where a file's rows say so."""

    shape: str
    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int


@dataclass(frozen=True)
class Row(Origin):
    """One implementation, direction and mode of one problem.

    shape: slug; T: tokens of a rank; routing: see `routings`; impl, variant, version:
    of the implementation; mode: eager, compiled or graph; cache: cold or hot; ms_*: milliseconds over `rounds` calls;
    tflops: of 6 T K H I operations forward and 12 backward, without those of dropped routes; ratio_dense: over that of
    dense in the same run, 0 without one; error: relative Frobenius error of the worst result against float32; host_us:
    microseconds of a call on the host; *_bytes: see `memory.Memory`; -1 where nobody measured.
    """

    ranks: int
    routing: str
    direction: str
    mode: str
    cache: str
    impl: str
    variant: str
    version: str
    rounds: int
    ms_median: float
    ms_min: float
    ms_max: float
    tflops: float
    ratio_dense: float
    error: float
    host_us: float
    saved_bytes: int
    workspace_bytes: int
    peak_bytes: int
    command: str


def gpu_word(device: torch.device) -> str:
    """Of a device: `NVIDIA H200` is h200; a CPU is cpu."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).lower().replace("nvidia", "").strip().replace(" ", "-")


@functools.cache
def driver_version() -> str:
    """As nvidia-smi says it, which takes its time, or an empty string."""
    return _first_word("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit_here() -> str:
    """The short hash of the commit that the working directory is at, or an empty string."""
    return _first_word("git", "rev-parse", "--short", "HEAD")


def _first_word(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[0] if found else ""


def machine(device: torch.device, commit: str) -> dict[str, str]:
    """The fields of `Machine`, now and here."""
    return {
        "gpu": gpu_word(device),
        "driver": driver_version() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit,
    }


def append_rows(path: Path, rows: Sequence[Machine]) -> None:
    """Adds rows of one kind to a file, with a heading where it is new.

    Raises:
        ValueError: the file is there and has other columns.
    """
    if not rows:
        return
    names = [field.name for field in fields(rows[0])]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            heading = next(csv.reader(file), [])
        if heading != names:
            raise ValueError(f"bench: out: expected a file with the columns {','.join(names)}, got {path}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})


def read_rows(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: it has other columns, or a value of another type.
    """
    with path.open(newline="") as file:
        return [_row(path, number, values) for number, values in enumerate(csv.DictReader(file), start=2)]


_TYPES = {"int": int, "float": float, "str": str}


def _row(path: Path, line: int, values: Mapping[str, str | None]) -> Row:
    try:
        return Row(**{field.name: _TYPES[str(field.type)](values[field.name]) for field in fields(Row)})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"bench: {path}:{line}: expected a row of the benchmark, got {error!r}") from None
