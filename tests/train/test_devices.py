"""Which GPU the ranks of a run take, with what environment and how many SMs, where there are fewer GPUs than ranks.

The CUDA functions of torch are replaced: no GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import moe_megakernel
from moe_megakernel.distributed.device_sharing import device_of, sharing_environment, sms_of_a_rank
from moe_megakernel.train import launch, worker
from moe_megakernel.train.config import ArgumentError, TrainConfig

OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
CUDA = TrainConfig(device="cuda")


@pytest.fixture
def gpus(monkeypatch):
    """gpus(number, sms): as if there were such devices; returns the list of those that were made current."""
    chosen: list[int] = []

    def pretend(number: int, sms: int = 132) -> list[int]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        properties = SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: properties)
        return chosen

    yield pretend
    moe_megakernel.set_num_sms(None)


@pytest.mark.parametrize(
    ("ranks", "devices", "of_each", "share"),
    [
        (1, 1, [0], None),
        (4, 1, [0, 0, 0, 0], 32),
        (8, 1, [0] * 8, 16),
        (3, 2, [0, 1, 0], 66),
        (4, 4, [0, 1, 2, 3], None),
        (2, 8, [0, 1], None),
        (66, 1, [0] * 66, 2),
        (67, 1, [0] * 67, 0),
    ],
)
def test_ranks_are_dealt_out_over_the_devices(ranks, devices, of_each, share):
    assert [device_of(rank, devices) for rank in range(ranks)] == of_each
    assert sms_of_a_rank(132, ranks, devices) == share
    assert set(sharing_environment(ranks, devices)) == (
        set() if share is None else {OVERLAP, "TORCH_SYMM_MEM_DISABLE_MULTICAST"}
    )


def test_launcher_sets_what_shared_devices_need(gpus):
    gpus(1)
    shared = launch._environment(replace(CUDA, ranks=2))
    assert shared[OVERLAP] == shared["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert OVERLAP not in launch._environment(replace(CUDA, ranks=1))
    assert OVERLAP not in launch._environment(replace(CUDA, ranks=2, device="cpu"))
    gpus(2)
    assert OVERLAP not in launch._environment(replace(CUDA, ranks=2))


@pytest.mark.parametrize("of_user", [None, "40"])
def test_rank_takes_its_device_and_its_share_of_it(gpus, monkeypatch, of_user):
    if of_user is not None:
        monkeypatch.setenv("MOE_MEGAKERNEL_NUM_SMS", of_user)
    chosen = gpus(2)
    assert not worker._take_device(rank=3, ranks=4)
    assert moe_megakernel.get_num_sms() == (66 if of_user is None else 40)
    moe_megakernel.set_num_sms(None)
    assert worker._take_device(rank=1, ranks=2)
    assert moe_megakernel.get_num_sms() == (None if of_user is None else 40)
    assert chosen == [1, 1]


def test_more_ranks_than_have_room(gpus):
    gpus(2, sms=14)
    launch._check_room(14)
    with pytest.raises(ArgumentError, match=r"^train: --ranks: expected at most 14 on 2 GPUs of 14 SMs, .* got 15$"):
        launch._check_room(15)
    gpus(1, sms=132)
    with pytest.raises(ArgumentError, match=r"expected at most 66 on 1 GPU of 132 SMs, two for each rank, got 70$"):
        launch._check_room(70)
