"""The GPUs of this machine as plain data, asked from the CUDA driver through cuda-python.

Owns every driver call of the command line; `doctor.py` and `symmetric_memory_reason` work on the data alone, so tests
hand in GPUs that do not exist. No call creates a CUDA context, and a machine without driver or GPU gives a note, never
an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Gpu:
    """One visible device. `shareable` says whether its memory can be handed to other processes as a file descriptor."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    shareable: bool = True

    @property
    def arch(self) -> str:
        """`sm_90` for capability (9, 0)."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Devices:
    """What the driver says. `peers[i][j]`: GPU i reaches the memory of GPU j. `note`: why there is nothing."""

    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    cuda_driver: str | None = None  # the newest CUDA version that the driver supports
    nvidia_driver: str | None = None
    note: str = ""


def probe() -> Devices:
    """Asks cuda-python, or torch where cuda-python is not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped]
    except ImportError:
        return _probe_with_torch("cuda-python is not installed (pip install cuda-python), asked torch instead")
    try:
        return _probe_with_driver(driver)
    except Exception as error:  # the bindings raise types of their own where libcuda is missing
        return Devices(nvidia_driver=_nvidia_driver(), note=f"no CUDA driver: {error}")


def symmetric_memory_reason(devices: Devices, torch_cuda: str | None) -> str:
    """Why the GPUs cannot share memory through torch's symmetric memory, or "" where they can."""
    if not devices.gpus:
        return "no GPU"
    if torch_cuda is None:
        return "this torch is built without CUDA"
    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed"
    for index, gpu in enumerate(devices.gpus):
        if not gpu.shareable:
            return f"GPU {index} cannot hand its memory to another process as a file descriptor"
    for i, row in enumerate(devices.peers):
        for j, reachable in enumerate(row):
            if not reachable:
                return f"GPU {i} cannot reach the memory of GPU {j}"
    return ""


def _probe_with_driver(driver: Any) -> Devices:
    def ask(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(code.name)
        return values[0] if values else None

    nvidia = _nvidia_driver()
    try:
        ask(driver.cuInit(0))
    except RuntimeError as error:
        if "NO_DEVICE" not in str(error):
            raise
        version = _cuda_version(ask(driver.cuDriverGetVersion()))
        return Devices(cuda_driver=version, nvidia_driver=nvidia, note=f"the driver shows no GPU ({error})")
    attribute = driver.CUdevice_attribute
    handles = [ask(driver.cuDeviceGet(index)) for index in range(ask(driver.cuDeviceGetCount()))]
    gpus = []
    for handle in handles:

        def value(name: str, handle: Any = handle) -> int:
            return int(ask(driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)))

        gpus.append(
            Gpu(
                name=ask(driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode(),
                capability=(value("COMPUTE_CAPABILITY_MAJOR"), value("COMPUTE_CAPABILITY_MINOR")),
                memory_bytes=int(ask(driver.cuDeviceTotalMem(handle))),
                multiprocessors=value("MULTIPROCESSOR_COUNT"),
                shareable=bool(value("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
            )
        )
    peers = tuple(tuple(a is b or bool(ask(driver.cuDeviceCanAccessPeer(a, b))) for b in handles) for a in handles)
    return Devices(tuple(gpus), peers, _cuda_version(ask(driver.cuDriverGetVersion())), nvidia)


def _probe_with_torch(note: str) -> Devices:
    if not torch.cuda.is_available():
        return Devices(nvidia_driver=_nvidia_driver(), note=f"{note}: no GPU")
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        gpus.append(Gpu(found.name, (found.major, found.minor), found.total_memory, found.multi_processor_count))
    peers = tuple(tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count))
    return Devices(tuple(gpus), peers, nvidia_driver=_nvidia_driver(), note=note)


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvidia_driver() -> str | None:
    """The kernel module's version, for instance 570.86.15, where Linux shows it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
