"""Processes that are the ranks of one gloo group: one a GPU where there are as many, else all on the first one.

`run_ranks` starts them, runs one function on all and gives back what rank 0 returned. Everything is bounded: processes
that do not end in time are killed. The caller never touches a GPU, so that it can start MPS before the ranks do.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from . import mps

#: Seconds that a rank waits for the others on the host.
HOST_LIMIT = 300.0
#: Several ranks of one GPU share memory only if told so, and need no multicast.
_SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclass(frozen=True)
class Rank:
    """What a function that runs on every rank is given first."""

    rank: int
    ranks: int
    device: torch.device
    shares_gpu: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def meet(self) -> None:
        """Waits for the other ranks, on the host."""
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values


def devices_for(ranks: int, gpus: int) -> list[str]:
    """The device of every rank."""
    if gpus == 0:
        return ["cpu"] * ranks
    return [f"cuda:{rank if gpus >= ranks else 0}" for rank in range(ranks)]


def require_gpu() -> None:
    """Without touching it.

    Raises:
        RuntimeError: there is none.
    """
    if torch.cuda.device_count() == 0:
        raise RuntimeError("ranks: device: expected a CUDA device, got none")


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, limit: float, gpus: int | None = None) -> Any:
    """Runs `function(rank, *args)` on all ranks; `function` is one of an importable module, `rank` a `Rank`.

    Args:
        limit: seconds for everything.
        gpus: to use; by default those that are there.

    Returns:
        What rank 0 returned.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others are ended.
        RuntimeError: a rank did not end in time.
    """
    devices = devices_for(ranks, torch.cuda.device_count() if gpus is None else gpus)
    # Hosted here, on a free port, for as long as the ranks live.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        context = mp.spawn(_enter, (function, devices, store.port, str(answer), args), nprocs=ranks, join=False)
        deadline = time.monotonic() + limit
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"ranks: expected to end within {limit:g} s, got processes that still run")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads(answer.read_bytes())


def _enter(
    rank: int, function: Callable[..., Any], devices: list[str], port: int, answer: str, args: tuple[Any, ...]
) -> None:
    shares = devices[0] != "cpu" and len(set(devices)) < len(devices)
    if shares:
        os.environ.update(_SHARED)
    if sys.platform.startswith("linux"):  # the ranks are on one host: gloo need not resolve its name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(devices)))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=HOST_LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(devices), timeout=limit)
    result = function(Rank(rank, len(devices), device, shares), *args)
    if rank == 0:
        Path(answer).write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def sharing(ranks: int, with_mps: bool, gpus: int | None = None) -> Iterator[str]:
    """Starts MPS for ranks that will share a GPU if `with_mps`, unless the environment names a server.

    Args:
        ranks, gpus: as for `run_ranks`.

    Gives:
        How they run: "own" (a GPU each), "mps" or "slices" (one after the other).
    """
    if (torch.cuda.device_count() if gpus is None else gpus) >= ranks:
        yield "own"
    elif mps.in_environment():
        yield "mps"
    elif with_mps:
        with mps.server():
            yield "mps"
    else:
        yield "slices"
