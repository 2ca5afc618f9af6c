"""NVIDIA MPS for the length of a benchmark: lets several processes run on one GPU at the same time.

Without it, processes that share a GPU take turns, and what waits for a peer waits for its turn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .environment import variables

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: Seconds that the control program gets to start, and to quit.
LIMIT = 30.0


def in_environment() -> bool:
    """Whether processes started from here find a server of somebody else."""
    return PIPES in os.environ


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Runs a server of its own; processes that are started inside use it. None of them may outlive it.

    Raises:
        RuntimeError: there is no MPS here, or it does not start.
    """
    if shutil.which(CONTROL) is None:
        raise RuntimeError(f"mps: expected the program {CONTROL}, got none in PATH; --no-mps does without")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        pipes, logs = Path(folder, "pipe"), Path(folder, "log")
        pipes.mkdir()
        logs.mkdir()
        with variables({PIPES: str(pipes), LOGS: str(logs)}):
            _start(logs)
            try:
                yield
            finally:
                _stop(pipes)


def _start(logs: Path) -> None:
    # Files, because the daemon would keep a pipe open behind the program that starts it.
    with (logs / "start.txt").open("w+") as output:
        try:
            code = subprocess.run([CONTROL, "-d"], stdout=output, stderr=output, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            output.seek(0)
            raise RuntimeError(f"mps: {CONTROL} -d: expected exit status 0, got {code}: {output.read().strip()}")


def _stop(pipes: Path) -> None:
    try:
        subprocess.run([CONTROL], input="quit\n", text=True, capture_output=True, timeout=LIMIT, check=True)
    except (OSError, subprocess.SubprocessError):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((pipes / f"{CONTROL}.pid").read_text()), signal.SIGTERM)
