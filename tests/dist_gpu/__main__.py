"""Runs the tests of this folder: `python -m tests.dist_gpu [arguments of pytest]`, or `make test-dist-gpu`.

Twice: the tests whose ranks work together, under MPS where ranks have to share a GPU; then, without MPS, those whose
ranks fail, since a client that is killed can disturb the others, and those under compute-sanitizer. Needs torch and
pytest; exits with 1 if either run failed, and with 0 where there is no GPU to run on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tests.dist_gpu import mps
from tests.dist_gpu.layers import MOST_RANKS
from tests.gpu.layers import missing_kernels

HERE = Path(__file__).parent
#: Run without MPS.
ALONE = [str(HERE / name) for name in ("test_failures.py", "test_sanitizer.py")]
#: Exit codes of pytest: all passed, none selected.
FINE = (0, 5)
#: Seconds for pytest to end its processes after Ctrl-C.
PATIENCE = 120


def main(arguments: list[str]) -> int:
    reason = missing_kernels()
    if reason:
        print(f"tests.dist_gpu: every test is skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the daemon is stopped
    with _working_together() as variables:
        together = _pytest(variables, str(HERE), *(f"--ignore={path}" for path in ALONE), *arguments)
    with mps.absent() as variables:
        failing = _pytest(variables, *ALONE, *arguments)
    return int(together not in FINE or failing not in FINE)


@contextlib.contextmanager
def _working_together() -> Iterator[Mapping[str, str]]:
    """Variables for ranks that run at the same time: of an MPS daemon, where there are fewer GPUs than ranks."""
    with contextlib.ExitStack() as stack:
        variables: Mapping[str, str] = {}
        if torch.cuda.device_count() < MOST_RANKS:
            try:
                variables = stack.enter_context(mps.running())
            except mps.MpsError as error:
                print(f"tests.dist_gpu: ranks take turns on the GPU, which takes longer: {error}", flush=True)
        yield variables


def _pytest(variables: Mapping[str, str], *arguments: str) -> int:
    """The exit code of one run in a process of its own, which may use CUDA under these variables only."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    run = subprocess.Popen(command, cwd=HERE.parents[1], env={**os.environ, **variables})
    try:
        return run.wait()
    except BaseException as error:
        # Its processes have to be gone before the daemon is. Ctrl-C has reached it, too; other signals have not.
        if not isinstance(error, KeyboardInterrupt):
            run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(PATIENCE)
        run.kill()
        run.wait()
        raise


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
