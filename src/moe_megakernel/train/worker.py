"""Entry of one rank's process: takes its orders from the parent, joins the group, trains, leaves a note if it fails.

Started by `launch.py` as `python -m moe_megakernel.train.worker`. The first line of standard input is the order; the
rest of it never comes, and its end means that the parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import moe_megakernel
from moe_megakernel.distributed.device_sharing import device_of, sms_of_a_rank

from .config import TrainConfig, TrainError
from .loop import train


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    order = json.loads(_read_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank, scratch = order["rank"], Path(order["scratch"])
    try:
        config = TrainConfig.from_json(order["config"])
        train(config, rank, _join(config, rank, order["port"]), order["begun"])
    except Exception as error:
        note = {
            "time": time.time(),
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
            "expected": isinstance(error, TrainError),
        }
        (scratch / f"failure-{rank}.json").write_text(json.dumps(note))
        # Leave at once: a peer may be waiting for this rank, and the end of the process is what tells it.
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _join(config: TrainConfig, rank: int, port: int) -> dist.ProcessGroup | None:
    """The group of all ranks; None for a run of one. NCCL where every rank has a GPU of its own, else gloo."""
    own_gpus = config.device == "cuda" and _take_device(rank, config.ranks)
    if config.ranks == 1:
        return None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own_gpus else "gloo",
        store=dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False),
        rank=rank,
        world_size=config.ranks,
    )
    return dist.group.WORLD


def _take_device(rank: int, ranks: int) -> bool:
    """Chooses this rank's GPU, and its share of the SMs where others run there too; whether it has it to itself."""
    devices = torch.cuda.device_count()
    torch.cuda.set_device(device_of(rank, devices))
    share = sms_of_a_rank(torch.cuda.get_device_properties().multi_processor_count, ranks, devices)
    if share is not None and moe_megakernel.get_num_sms() is None:  # unless the environment says otherwise
        moe_megakernel.set_num_sms(share)
    return share is None


def _read_line() -> bytes:
    # Not sys.stdin: a thread that blocks in its buffer would hold a lock that Python wants at exit.
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            raise SystemExit("the parent process ended before it gave orders")
        line += chunk
    return line


def _end_with_parent() -> None:
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
