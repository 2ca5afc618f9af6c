"""One rank's process: joins the world, then runs the functions that the tests send and answers with what came out.

Started by `pool.Pool`, which calls `main` with this process's end of a pipe. It ends when that pipe closes.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import moe_megakernel
from moe_megakernel.distributed.device_sharing import device_of, sms_of_a_rank

#: Seconds that a rank waits for its peers unless a test says otherwise; far below the pool's own limit.
TIMEOUT = 40.0


@dataclass(frozen=True)
class Rank:
    """What a function that runs on every rank is given first: where it runs, and a group of its own."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def name(self) -> str:
        """The name by which the op finds the group."""
        return self.group.group_name

    def meet(self) -> None:
        """Waits for the other ranks, outside the layer."""
        dist.barrier(self.group)


@dataclass(frozen=True)
class Start:
    """The first order of the test process: who this is, the folder of a file store, and "cpu" or "cuda"."""

    rank: int
    ranks: int
    folder: str | None
    device: str


@dataclass(frozen=True)
class Call:
    """One order of the test process: run `function(rank, *args)`, in a new group unless `world` is set."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world: bool = False


def _send(link: Connection, value: Any) -> None:
    # Plain pickles: those of torch.multiprocessing would put tensors into shared memory.
    link.send_bytes(pickle.dumps(value))


def _receive(link: Connection) -> Any:
    return pickle.loads(link.recv_bytes())


def _join(link: Connection, start: Start) -> None:
    """Makes the world group: over a store that rank 0 hosts on a free port, or over files."""
    store: dist.Store
    limit = timedelta(seconds=TIMEOUT)
    if start.folder is not None:
        store = dist.FileStore(os.path.join(start.folder, "store"), start.ranks)
    elif start.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, start.ranks, True, limit, wait_for_workers=False)
        _send(link, ("port", store.port))
    else:
        store = dist.TCPStore("127.0.0.1", _receive(link), start.ranks, False, limit)
    dist.init_process_group("gloo", store=store, rank=start.rank, world_size=start.ranks, timeout=limit)


def _take_device(start: Start) -> torch.device:
    """This rank's device; of a GPU that others run on too it takes its share of the SMs."""
    if start.device != "cuda":
        return torch.device(start.device)
    devices = torch.cuda.device_count()
    device = torch.device("cuda", device_of(start.rank, devices))
    torch.cuda.set_device(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    moe_megakernel.set_num_sms(sms_of_a_rank(sms, start.ranks, devices))
    return device


def _run(call: Call, device: torch.device) -> tuple[str, Any]:
    group = dist.group.WORLD if call.world else dist.new_group()
    assert group is not None
    if "MOE_MEGAKERNEL_TIMEOUT" not in os.environ:
        moe_megakernel.set_timeout(TIMEOUT)
    torch.manual_seed(0)
    try:
        result = call.function(Rank(dist.get_rank(), dist.get_world_size(), group, device), *call.args)
        moe_megakernel.check_errors()  # none may be left for the next call
    except BaseException:
        return "error", traceback.format_exc()
    if not call.world:
        dist.destroy_process_group(group)
    return "result", result


def main(descriptor: int) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    # Compile caches know neither effects nor ranks.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TMPDIR", "/tmp"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, f"rank-{os.getpid()}-{time.time_ns()}")
    # Less to compile, and no further processes.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    link = Connection(descriptor)
    try:
        start = _receive(link)
        _join(link, start)
        device = _take_device(start)
        while True:
            _send(link, _run(_receive(link), device))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
