"""Fixtures of the tests of trace analysis: files of hand-made traces, and the analysis of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.profiling.handmade import Trace, training_step

from moe_megakernel.profiling import Row, analyse_files


@pytest.fixture
def analyse(tmp_path: Path) -> Callable[[Trace], Row]:
    """analyse(trace): the only row of the trace, written to a file and read again."""

    def only_row(trace: Trace) -> Row:
        (row,) = analyse_files([trace.write(tmp_path / "trace.json")]).rows
        return row

    return only_row


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[Path]:
    """The example of docs/profile.md: two ranks, the second with a longer dispatch."""
    lengths = enumerate((150.0, 250.0))
    return [training_step(rank, length).write(tmp_path / f"rank{rank}.pt.trace.json") for rank, length in lengths]
