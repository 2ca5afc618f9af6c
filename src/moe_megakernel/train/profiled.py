"""`train --profile`: records some steps of every rank, and leaves their traces and the report of all ranks.

Called by `loop.py`. A rank records by itself; only the report needs all traces, so rank 0 writes it after the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rich.console import Console

from moe_megakernel.profiling.files import analyse_files
from moe_megakernel.profiling.picture import write_picture
from moe_megakernel.profiling.recorder import profile
from moe_megakernel.profiling.tables import print_report

from .config import TrainConfig

#: Steps recorded, counted from 1 at the start of the process. The first one compiles; left out unless it is alone.
FIRST, LAST = 2, 5
#: Columns of profile.txt.
WIDTH = 120


class ProfiledSteps:
    """Records steps `FIRST` to `LAST` of this process, or its only one; nothing unless the run asks for it.

    Args:
        config: of the run; `profile` says whether to record.
        rank: of this process.
        first_step: steps that were done before this process began.
    """

    def __init__(self, config: TrainConfig, rank: int, first_step: int) -> None:
        self.config = config
        self.trace = trace_path(config, rank)
        steps = config.steps - first_step
        begin = min(FIRST, steps)
        self._wanted = range(first_step + begin - 1, first_step + min(LAST, steps)) if config.profile else range(0)
        self._recorder: profile | None = None

    def __enter__(self) -> ProfiledSteps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:  # the run ends inside the recording: something was raised
            self._recorder.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Stands around step `step` of the run, counted from 0."""
        if step not in self._wanted:
            yield
            return
        if self._recorder is None:
            self._recorder = profile()
            self._recorder.__enter__()
        with self._recorder.step():
            yield
        if step == self._wanted[-1]:
            recorder, self._recorder = self._recorder, None
            recorder.__exit__(None, None, None)
            recorder.save(self.trace)


def trace_path(config: TrainConfig, rank: int) -> Path:
    """Where a rank's trace goes."""
    return Path(config.out) / f"rank{rank}.pt.trace.json.gz"


def write_profile(config: TrainConfig) -> None:
    """Prints the report of all ranks' traces, and writes profile.txt and profile.png into `config.out`."""
    out = Path(config.out)
    report = analyse_files([trace_path(config, rank) for rank in range(config.ranks)])
    print_report(report, Console())
    with (out / "profile.txt").open("w") as file:
        print_report(report, Console(file=file, width=WIDTH))
    write_picture(report, out / "profile.png")
    Console().print(f"see {out / 'profile.txt'} and {out / 'profile.png'}", highlight=False, soft_wrap=True)
