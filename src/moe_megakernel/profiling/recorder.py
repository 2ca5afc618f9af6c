"""`moe_megakernel.profile`: a context manager that records a block with torch.profiler and analyses what it recorded.

The same code as `moe-megakernel profile` on a file does the analysis, on the trace that the profiler writes. Also used
by `train --profile`.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .errors import ProfileError
from .report import Report


class profile:
    """Records the block and reports where its time went.

        with moe_megakernel.profile() as p:
            train_step()
        p.print()

    Records CPU ops, and CUDA kernels where there is a CUDA device; the device is waited for at both ends. In an
    initialised process group every rank that is to be seen uses it by itself: nothing is sent between ranks, and the
    trace tells the rank. An exception of the block passes through unchanged, and then there is no report.

    Args:
        rules: a file of rules to put in front of the shipped ones (docs/profile.md).

    Raises:
        ProfileError: `rules` is no such file (from the constructor), or `report` is asked for and there is none: the
            block has not ended, it raised, or nothing ran in it.
    """

    def __init__(self, rules: str | Path | None = None) -> None:
        from .rules import load_rules

        self._rules = load_rules(rules)
        self._torch: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._trace: Path | None = None
        self._report: Report | None = None
        self._reason = ProfileError("report", "a block that has ended", "one that has not begun")
        self._steps = 0

    def __enter__(self) -> profile:
        if self._torch is not None:
            raise ProfileError("profile", "one block for each object", "a second one")
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CPU]
        if torch.cuda.is_available():
            kinds.append(activity.CUDA)
            torch.cuda.synchronize()  # what was launched before is not of this block
        self._torch = torch.profiler.profile(activities=kinds)
        self._torch.__enter__()
        self._reason = ProfileError("report", "a block that has ended", "one that runs")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reason = ProfileError("report", "a block that has ended", f"one that raised {type(error).__name__}")
            with contextlib.suppress(Exception):  # the block's own error is the one to see
                self._torch.__exit__(kind, error, trace)
            return
        self._torch.__exit__(kind, error, trace)
        self._folder = tempfile.TemporaryDirectory(prefix="moe-profile-", ignore_cleanup_errors=True)
        self._trace = Path(self._folder.name) / "trace.pt.trace.json"
        self._torch.export_chrome_trace(str(self._trace))  # torch can do that once

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Marks its block as one step: where steps are marked, the report is of them alone, per step."""
        with torch.profiler.record_function(f"ProfilerStep#{self._steps}"):
            yield
        self._steps += 1

    @property
    def report(self) -> Report:
        """What was found; the trace is analysed when this is first asked for."""
        if self._report is None:
            if self._trace is None:
                raise self._reason
            from .files import analyse_files

            self._report = analyse_files([self._trace], self._rules)
        return self._report

    def print(self) -> None:
        """Prints the report as tables."""
        from .tables import print_report

        print_report(self.report)

    def save(self, path: str | Path) -> None:
        """Writes the trace, for `moe-megakernel profile` or ui.perfetto.dev; gzip where `path` ends in .gz."""
        if self._trace is None:
            raise self._reason
        if str(path).endswith(".gz"):
            import gzip

            with self._trace.open("rb") as source, gzip.open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        else:
            shutil.copyfile(self._trace, path)
