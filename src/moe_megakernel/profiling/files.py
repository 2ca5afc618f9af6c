"""From paths to a report: finds the traces of a folder, reads them one after the other, numbers the ranks.

Called by the command line and by the recorder. Only one trace is in memory at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from .analysis import analyse
from .errors import ProfileError
from .reader import read_trace
from .report import Report, Row
from .rules import Rules, load_rules

#: Called with a file, the bytes of it read so far, and its size.
Progress = Callable[[Path, int, int], None]


def analyse_files(paths: Sequence[str | Path], rules: Rules | None = None, progress: Progress | None = None) -> Report:
    """The report of traces of one or several ranks.

    A rank's number is what its trace says (`distributedInfo`), else what the file's name says (`rank3...`), else the
    next one that is free, in the order given.

    Args:
        paths: files, or folders of them (`find_traces`).
        rules: as `load_rules` gives them; the shipped ones if None.
        progress: called while files are read.

    Raises:
        ProfileError: a path does not exist, or is no usable trace.
    """
    rules = load_rules() if rules is None else rules
    ranks: list[int | None] = []
    rows: list[list[Row]] = []
    for path in find_traces(paths):
        size = path.stat().st_size if progress is not None and path.exists() else 0
        tell = None if progress is None else _teller(progress, path, size)
        trace = read_trace(path, tell)
        ranks.append(trace.rank)
        found = analyse(trace, rules)
        if not found:
            raise ProfileError(path, "kernels or CPU ops that took time", "only empty ones")
        rows.append(found)
    numbered = [
        dataclasses.replace(row, rank=rank)
        for rank, found in zip(number_ranks(ranks), rows, strict=True)
        for row in found
    ]
    return Report(sorted(numbered, key=lambda row: row.rank))


def find_traces(paths: Sequence[str | Path]) -> list[Path]:
    """Files as they are; for a folder its `*.pt.trace.json[.gz]` if there are any, else all its `*.json[.gz]`.

    Raises:
        ProfileError: a folder without such files.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        for pattern in ("*.pt.trace.json", "*.json"):
            inside = sorted([*path.glob(pattern), *path.glob(f"{pattern}.gz")], key=_by_numbers)
            if inside:
                break
        else:
            raise ProfileError(path, "a folder with *.json or *.json.gz", "none in it", exit_code=2)
        found += inside
    return found


def number_ranks(told: Sequence[int | None]) -> list[int]:
    """The ranks that files tell; those that tell none get the lowest numbers that are left, in order."""
    taken = {rank for rank in told if rank is not None}
    free = (number for number in range(len(told) + len(taken)) if number not in taken)
    return [next(free) if rank is None else rank for rank in told]


def _teller(progress: Progress, path: Path, size: int) -> Callable[[int], None]:
    return lambda read: progress(path, read, size)


def _by_numbers(path: Path) -> list[tuple[int, str]]:
    """Sorts rank10 behind rank9."""
    words: list[tuple[int, str]] = []
    digits = ""
    for letter in path.name + "\0":
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            words.append((int(digits), ""))
            digits = ""
        words.append((-1, letter))
    return words
