"""A stream whose kernels run on a rank's own SMs of a shared GPU, by a CUDA green context.

Processes under MPS are spread over all SMs as they come; with SMs of its own each works as a smaller GPU would. Shares
are whole GPCs where they can be, so that what the SMs of a GPC share is not shared with other processes. All ranks cut
the GPU in the same way, so their shares are disjoint. Needs cuda-python (`pip install cuda-python`).
"""

from __future__ import annotations

from typing import Any

import torch

#: CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE, of an enumeration that cuda-python has named differently.
_WHOLE_GPCS = 2
#: Green contexts and their streams of this process; both live as long as it does.
_kept: list[Any] = []


def own_stream(rank: int, ranks: int, sms: int) -> torch.cuda.Stream:
    """A new stream on the `rank`-th share of the current device's SMs.

    Args:
        rank, ranks: which share, of how many.
        sms: of each share; the driver rounds up to multiples of 8.

    Raises:
        RuntimeError: cuda-python is missing, the driver refuses, or there are not enough SMs.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "ranks: own SMs: expected the package cuda-python, got none; --no-own-sms does without"
        ) from error

    def checked(what: str, answer: tuple[Any, ...]) -> list[Any]:
        code, *values = answer
        if int(code) != 0:
            raise RuntimeError(f"ranks: own SMs: expected {what} to succeed, got {code!s}; --no-own-sms does without")
        return values

    torch.zeros(1, device="cuda")  # the primary context, which green contexts belong to
    (device,) = checked("cuDeviceGet", driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    (whole,) = checked("cuDeviceGetDevResource", driver.cuDeviceGetDevResource(device, kind))
    split = driver.cuDevSmResourceSplitByCount(ranks, whole, _WHOLE_GPCS, sms)
    shares, count, _ = checked("cuDevSmResourceSplitByCount", split)
    if count < ranks:
        raise RuntimeError(
            f"ranks: own SMs: expected {ranks} shares of {sms} SMs, got {count}; --no-own-sms does without"
        )
    (description,) = checked("cuDevResourceGenerateDesc", driver.cuDevResourceGenerateDesc([shares[rank]], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    (context,) = checked("cuGreenCtxCreate", driver.cuGreenCtxCreate(description, device, flags))
    blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    (stream,) = checked("cuGreenCtxStreamCreate", driver.cuGreenCtxStreamCreate(context, blocking, 0))
    _kept.extend((context, stream))
    return torch.cuda.ExternalStream(int(stream))
