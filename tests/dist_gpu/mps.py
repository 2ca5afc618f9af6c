"""NVIDIA MPS for the time of a test run: lets kernels of several processes run on one GPU at the same time.

Without it the processes take turns on the GPU, a few milliseconds each, and every wait of a kernel for another rank
costs a turn. The daemon started here is this run's own: it has its own folder, and ends with the `with` block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: Seconds: for one command, for clients to leave once the daemon is told to end, for the daemon to be gone.
COMMAND_LIMIT, CLIENT_LIMIT, EXIT_LIMIT = 60, 30, 10


class MpsError(Exception):
    """The daemon did not start."""


def is_running(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with this environment is a client of an MPS daemon."""
    return _alive(_daemon_pid(environment))


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Starts a daemon and yields the variables that make a process its client; ends the daemon in every case.

    Raises:
        MpsError: it does not start, with what it said.
    """
    with _folder() as folder:
        if shutil.which(CONTROL) is None:
            raise MpsError(f"expected the program {CONTROL}, got none")
        variables = {PIPES: str(folder / "pipe"), LOGS: str(folder / "log")}
        for path in variables.values():
            os.mkdir(path)
        try:
            said, code = _control(folder, variables, ["-d"])
            if code != 0:
                raise MpsError(f"{CONTROL} -d: expected exit code 0, got {code}: {said.strip() or 'no message'}")
            yield variables
        finally:
            _stop(folder, variables)


@contextlib.contextmanager
def absent() -> Iterator[dict[str, str]]:
    """Yields the variables that keep a process away from any MPS daemon of the machine: a folder without one."""
    with _folder() as folder:
        yield {PIPES: str(folder)}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    # Not TMPDIR: the daemon makes sockets there, whose paths may have 107 characters.
    place = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="moe-mps-", dir=place, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _control(folder: Path, variables: Mapping[str, str], arguments: list[str], told: str = "") -> tuple[str, int]:
    """Runs the control program and returns what it wrote and its exit code.

    Its output goes to a file: the daemon inherits it, and would hold a pipe open. It runs in a session of its own,
    which Ctrl-C on the terminal does not reach.
    """
    with (folder / "said").open("w+") as said:
        done = subprocess.run(
            [CONTROL, *arguments],
            env={**os.environ, **variables},
            input=told,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT,
            start_new_session=True,
            check=False,
        )
        said.seek(0)
        return said.read(), done.returncode


def _stop(folder: Path, variables: Mapping[str, str]) -> None:
    pid = _daemon_pid(variables)
    if not _alive(pid):
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        _control(folder, variables, [], f"quit -t {CLIENT_LIMIT}\n")
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + EXIT_LIMIT
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)


def _daemon_pid(variables: Mapping[str, str]) -> int:
    """The daemon's process, by the file that it writes; 0 without one."""
    with contextlib.suppress(OSError, ValueError):
        return int((Path(variables.get(PIPES, "/tmp/nvidia-mps")) / f"{CONTROL}.pid").read_text())
    return 0


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's, but there
        return True
    with contextlib.suppress(OSError, IndexError):  # one that has ended may wait long for a container's init to notice
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True
