"""Processes that stand for the ranks of a group, and functions sent to all of them at once.

A `Pool` serves many tests, since a process takes seconds to import torch; tests that kill or poison start one of their
own. Every wait has a limit: a hang is a failure that names the ranks and shows where they stand.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
from tests.distributed.worker import Call, Start

from moe_megakernel.distributed.device_sharing import sharing_environment

ROOT = Path(__file__).parents[2]
#: Seconds: to import torch and join the world, to run a call, for the others once one has failed, to end once told to.
START_LIMIT, CALL_LIMIT, GRACE, EXIT_LIMIT = 120.0, 150.0, 60.0, 20.0
#: What a rank that was killed answers.
KILLED = "killed"


def _python_path() -> str:
    """The repository first, for the tests' own modules, then what the caller has."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


class Pool:
    """`ranks` processes in one gloo world, started at the first call and kept for the next ones.

    Args:
        ranks: W.
        environment: variables set in the processes.
        folder: where a `FileStore` is kept; by default rank 0 hosts a TCP store on a free port.
        device: "cpu" or "cuda"; ranks are dealt out over the GPUs there are, and share them where there are too few.
        limit: seconds for a call of all ranks together, unless the call says otherwise.
    """

    def __init__(
        self,
        ranks: int,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        device: str = "cpu",
        limit: float = CALL_LIMIT,
    ) -> None:
        self.ranks, self._limit = ranks, limit
        self._environment = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        if device == "cuda":
            self._environment |= sharing_environment(ranks, torch.cuda.device_count())
        self._folder, self._device = folder, device
        self._workers: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        self._logs: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, world: bool = False, limit: float | None = None) -> list:
        """Runs `function(rank, *args)` on every rank and returns the results in rank order.

        Args:
            function: a function of a module, found by its name; its first argument is a `worker.Rank`.
            args: pickled.
            world: run it on the world group instead of a new one.
            limit: seconds for all ranks together, beside those that the processes take to start.

        Raises:
            AssertionError: a rank raised, died or did not answer; the processes are replaced.
        """
        answers = self.run_with_deaths(function, *args, world=world, limit=limit)
        if KILLED in answers:
            self.close()
            raise AssertionError(f"expected an answer of every rank, got {answers}{self._tail(answers.index(KILLED))}")
        return answers

    def run_with_deaths(
        self, function: Callable[..., Any], *args: Any, world: bool = False, limit: float | None = None
    ) -> list:
        """As `run`, but the answer of a rank that was killed by SIGKILL is `KILLED`."""
        starting = START_LIMIT if self._start() else 0.0
        for link in self._links:
            link.send_bytes(pickle.dumps(Call(function, args, world)))
        return self._collect(starting + (self._limit if limit is None else limit))

    def close(self) -> None:
        """Ends the processes by force. Where they use a GPU they get the time to leave it in order."""
        if self._device == "cuda":
            # A client of MPS that is killed in a kernel can disturb the others. Kernels' waits end by themselves.
            for link in self._links:
                link.close()
            deadline = time.monotonic() + GRACE
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers, self._links = [], []

    def leave(self) -> list[float]:
        """Closes the pipes and returns the seconds each process took to end by itself.

        Raises:
            AssertionError: one did not end in time.
        """
        begin, seconds = time.monotonic(), []
        for link in self._links:
            link.close()
        for rank, worker in enumerate(self._workers):
            try:
                worker.wait(max(0.1, begin + EXIT_LIMIT - time.monotonic()))
            except subprocess.TimeoutExpired:
                stack = self._stacks([rank])[rank]
                self.close()
                raise AssertionError(f"rank {rank}: expected to end within {EXIT_LIMIT:g} s{stack}") from None
            seconds.append(time.monotonic() - begin)
        self.close()
        return seconds

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Starts the processes unless they are there; whether it did."""
        if self._workers:
            return False
        self._logs = [tempfile.TemporaryFile() for _ in range(self.ranks)]  # noqa: SIM115 (read after a failure)
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            entry = f"from tests.distributed.worker import main; main({theirs.fileno()})"
            worker = subprocess.Popen(
                [sys.executable, "-c", entry],
                cwd=ROOT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._logs[rank],
                stderr=subprocess.STDOUT,
            )
            theirs.close()
            self._workers.append(worker)
            self._links.append(ours)
            folder = None if self._folder is None else str(self._folder)
            ours.send_bytes(pickle.dumps(Start(rank, self.ranks, folder, self._device)))
        if self._folder is None:
            assert self._links[0].poll(START_LIMIT), f"rank 0 did not start{self._tail(0)}"
            kind, port = self._receive(0)
            assert kind == "port", port
            for link in self._links[1:]:
                link.send_bytes(pickle.dumps(port))
        return True

    def _collect(self, limit: float) -> list:
        deadline = time.monotonic() + limit
        answers: list[Any] = [KILLED] * self.ranks
        failures: dict[int, str] = {}
        waiting = set(range(self.ranks))
        while waiting and time.monotonic() < deadline:
            links = {self._links[r]: r for r in waiting}
            for link in wait(list(links), max(0.0, deadline - time.monotonic())):
                rank = links[link]
                waiting.remove(rank)
                kind, value = self._receive(rank)
                if kind == "result":
                    answers[rank] = value
                elif kind != KILLED:
                    failures[rank] = value
                    # The others may now wait for this rank in vain: give them time to say what they saw, no more.
                    deadline = min(deadline, time.monotonic() + GRACE)
        failures |= {rank: f"no answer in time{stack}" for rank, stack in self._stacks(waiting).items()}
        if failures:
            self.close()
            text = "".join(f"\n--- rank {rank}: {trace}" for rank, trace in sorted(failures.items()))
            raise AssertionError(f"ranks {sorted(failures)} failed{text}")
        return answers

    def _receive(self, rank: int) -> tuple[str, Any]:
        """The next message of a rank: a pair of "result" or "error" and a value, or what its death looks like."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            return pickle.loads(self._links[rank].recv_bytes())
        code = self._workers[rank].wait()
        return (KILLED, None) if code == -signal.SIGKILL else ("error", f"ended with code {code}{self._tail(rank)}")

    # -- what the processes wrote -------------------------------------------------------------------------------------

    def _stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Makes processes write their stacks, and returns the ends of their logs by rank."""
        alive = [rank for rank in ranks if self._workers[rank].poll() is None]
        for rank in alive:
            self._workers[rank].send_signal(signal.SIGUSR1)
        if alive:
            time.sleep(1)
        return {rank: self._tail(rank) for rank in ranks}

    def _tail(self, rank: int) -> str:
        log = self._logs[rank]
        log.seek(0)
        return f"\n--- end of the log of rank {rank}\n{log.read().decode(errors='replace')[-4000:]}"
