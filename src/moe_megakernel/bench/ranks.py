"""The ranks of a benchmark: those of torchrun, or this process alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..config import set_num_sms
from ..distributed.device_sharing import device_of, sharing_environment, sms_of_a_rank


@contextlib.contextmanager
def rank_group(device: str) -> Iterator[tuple[dist.ProcessGroup | None, torch.device]]:
    """Joins the group that torchrun has set up, for as long as the context lasts.

    Ranks get a GPU each where there are as many, with NCCL and gloo; otherwise they share, with gloo alone.

    Gives:
        The group of all ranks, or None for a single one; and this rank's device.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield None, torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
        return
    local, backend = int(os.environ.get("LOCAL_RANK", "0")), "gloo"
    place = torch.device("cpu")
    if device == "cuda":
        devices = torch.cuda.device_count()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
        os.environ.update(sharing_environment(local_ranks, devices))
        place = torch.device("cuda", device_of(local, devices))
        torch.cuda.set_device(place)
        backend = "cuda:nccl,cpu:gloo" if devices >= local_ranks else "gloo"
        set_num_sms(sms_of_a_rank(torch.cuda.get_device_properties(place).multi_processor_count, local_ranks, devices))
    dist.init_process_group(backend)
    try:
        yield dist.group.WORLD, place
    finally:
        dist.destroy_process_group()
