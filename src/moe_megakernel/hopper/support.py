"""Which calls the fused kernels can run, and what runs where they cannot: the rule behind `backend=`.

`kernel_fault` looks at a call's sizes, `settle_backend` joins it with what the device and the build allow (`backends`).
Called by the op at every call and by `backend_for`.
"""

from __future__ import annotations

import threading
import warnings
from typing import NamedTuple

import torch

from ..backends import available_backends, select_backend

#: Experts whose counters fit the route kernel's shared memory, kMaxRouteExperts in `moe/plan/plan_scratch.h`.
MAX_EXPERTS = 1024
#: H and I are multiples of it: rows of bfloat16 are then multiples of 16 bytes, which bulk copies need.
UNIT = 8
#: The rule of `kernel_fault` in words.
RULES = f"bfloat16, H and I that are multiples of {UNIT}, at most {MAX_EXPERTS} experts"

_lock = threading.Lock()
_warned: set[str] = set()


def kernel_fault(dtype: torch.dtype, hidden: int, width: int, num_experts: int) -> str:
    """Why the kernels cannot run such a call on any device, as "argument: expected ..., got ...", or "".

    The number of ranks does not matter: with several, the same kernels run the layer (`peer`) or each rank's experts
    (`rows`).
    """
    if dtype is not torch.bfloat16:
        return f"x: expected bfloat16, got {str(dtype).removeprefix('torch.')}"
    if hidden % UNIT or width % UNIT:
        return f"w_down: expected H and I to be multiples of {UNIT}, got H = {hidden}, I = {width}"
    if num_experts > MAX_EXPERTS:
        return f"num_experts: expected at most {MAX_EXPERTS}, got {num_experts}"
    return ""


def settle_backend(asked: str, usable: str, fault: str) -> str:
    """The backend that runs a call: `usable`, or the reference where the kernels have a fault to find.

    "auto" falls back without a word; who has named a backend is warned, once for each reason.

    Args:
        asked: what the caller passed.
        usable: what `backends.select_backend` made of it on this device.
        fault: of `kernel_fault`.
    """
    if not fault or usable == "reference":
        return usable
    if asked != "auto":
        with _lock:
            new = fault not in _warned
            _warned.add(fault)
        if new:
            warnings.warn(
                f"dispatch_gemm_combine: backend: expected a call that {asked!r} can run, got {fault}; "
                "the reference backend runs it",
                stacklevel=3,
            )
    return "reference"


class BackendChoice(NamedTuple):
    """What runs a call. `reason`: why no faster backend does, or ""."""

    backend: str
    reason: str


def backend_for(
    hidden: int,
    expert_width: int,
    num_experts: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    backend: str = "auto",
) -> BackendChoice:
    """Which backend the layer takes for such calls on a device, without running anything.

    Args:
        hidden, expert_width, num_experts: H, I, E, the last of the whole group.
        dtype: of x and the weights.
        device: where x lies. For a CUDA device, torch asks for its compute capability, which initialises CUDA.
        backend: as in the op.

    Raises:
        ValueError: `backend` is unknown or cannot run on the device at all, as in the op.
    """
    device = torch.device(device)
    capability = device_capability(device)
    usable = select_backend(backend, device.type, capability)
    fault = kernel_fault(dtype, hidden, expert_width, num_experts)
    if backend == "reference":
        return BackendChoice("reference", "asked for")
    if usable == "reference":
        return BackendChoice("reference", available_backends(device.type, capability)["mega"])
    return BackendChoice("reference", fault) if fault else BackendChoice(usable, "")


_capabilities: dict[torch.device, tuple[int, int]] = {}


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, or None for another and where there is no CUDA."""
    found = _capabilities.get(device)
    if found is not None or device.type != "cuda" or not torch.cuda.is_available():
        return found
    found = torch.cuda.get_device_capability(device)
    if device.index is not None:  # without one it means the current device
        _capabilities[device] = found
    return found
