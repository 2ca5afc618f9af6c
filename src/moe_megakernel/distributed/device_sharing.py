"""Where ranks of one host run when there may be fewer GPUs than ranks: which device, which environment, how many SMs.

Several ranks on one GPU are for development and tests: kernels of all of them have to find room at the same time. Used
by the trainer's launcher and by the test suite; pure arithmetic, so that it can be tested without a GPU.
"""

from __future__ import annotations

#: What torch's symmetric memory needs where ranks share a device: it refuses that by default, and multicast cannot
#: join two allocations of one device.
_SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def device_of(rank: int, devices: int) -> int:
    """The index of the device that a rank of this host runs on: ranks are dealt out in turns."""
    return rank % devices


def most_ranks_on_a_device(ranks: int, devices: int) -> int:
    """How many ranks the fullest device carries."""
    return -(-ranks // devices)


def sharing_environment(ranks: int, devices: int) -> dict[str, str]:
    """Variables that the ranks' processes need from their start; none where every rank has a device of its own."""
    return dict(_SHARED) if ranks > devices else {}


def sms_of_a_rank(sms: int, ranks: int, devices: int) -> int | None:
    """What each rank passes to `set_num_sms`, so that the kernels of all ranks of a device run at the same time.

    Args:
        sms: streaming multiprocessors of the device.
        ranks, devices: on this host.

    Returns:
        An even number, 0 where there are not two SMs for every rank; None where no device is shared.
    """
    return sms // most_ranks_on_a_device(ranks, devices) // 2 * 2 if ranks > devices else None
