"""`moe-megakernel doctor`: what this machine has, which backend and transport would run, and why no other one would.

`diagnose` gathers everything as one JSON-able report, `render` prints it as tables. The choice itself is made in
`moe_megakernel.backends`, which the ops ask too; this file only shows it.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from moe_megakernel import _native, backends
from moe_megakernel.hopper import support

from .devices import Devices, Gpu, probe, symmetric_memory_reason

#: What "auto" means where the transport peer may be usable.
TRANSPORT_RULE = (
    "With several ranks, transport auto takes peer if the ranks find out at the group's first call that they can share "
    "memory (one host, a GPU each), and otherwise collective, around the same backend"
)
_PACKAGES = ("moe-megakernel", "torch", "triton", "cuda-python", "safetensors")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show versions, GPUs, peer access, and which backend the layer would use here and why not another."""
    report = diagnose(probe())
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        render(report, Console())


def diagnose(devices: Devices, torch_cuda: str | None = torch.version.cuda) -> dict[str, Any]:
    """The report, of JSON types only.

    Args:
        devices: what the driver says.
        torch_cuda: the CUDA version that torch is built with, None for a CPU build.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    versions |= {name: _version(name) for name in _PACKAGES}
    versions["torch's CUDA"] = torch_cuda
    versions["driver's CUDA"] = devices.cuda_driver
    versions["NVIDIA driver"] = devices.nvidia_driver
    symmetric = symmetric_memory_reason(devices, torch_cuda)
    runs_on = [_choices("cpu", None)]
    runs_on += [_choices(f"cuda:{index}", gpu, torch_cuda) for index, gpu in enumerate(devices.gpus)]
    return {
        "versions": versions,
        "native_library": _library(_native.library_path(), _native.why_missing()),
        "cuda_library": _library(_native.cuda_library_path(), _native.why_cuda_missing()),
        "kernels_take": support.RULES,
        "transport_rule": TRANSPORT_RULE,
        "built_archs": [f"sm_{major}{minor}" for major, minor in backends.built_capabilities()],
        "gpus": [
            {
                "index": index,
                "name": gpu.name,
                "arch": gpu.arch,
                "memory_bytes": gpu.memory_bytes,
                "multiprocessors": gpu.multiprocessors,
            }
            for index, gpu in enumerate(devices.gpus)
        ],
        "gpu_note": devices.note,
        "peer_access": [list(row) for row in devices.peers],
        "symmetric_memory": {"available": not symmetric, "reason": symmetric},
        "devices": runs_on,
    }


def _library(path: Path | None, reason: str | None) -> dict[str, Any]:
    return {"loaded": path is not None, "path": None if path is None else str(path), "reason": reason or ""}


def _choices(device: str, gpu: Gpu | None, torch_cuda: str | None = None) -> dict[str, Any]:
    """For one device: every backend and transport with the reason against it ("" for none), and what "auto" takes."""
    kind = device.split(":")[0]
    usable = backends.available_backends(kind, None if gpu is None else gpu.capability)
    transports = backends.available_transports(kind)
    if not transports["peer"] and usable["mega"]:
        transports["peer"] = "needs the backend mega or staged"
    if gpu is not None and torch_cuda is None:
        usable = {name: reason or "this torch is built without CUDA" for name, reason in usable.items()}
        transports = {name: reason or "this torch is built without CUDA" for name, reason in transports.items()}
    return {
        "device": device,
        "backends": usable,
        "transports": transports,
        "auto_backend": _first_usable(usable),
        "auto_transport": _first_usable(transports),
    }


def _first_usable(reasons: dict[str, str]) -> str | None:
    return next((name for name, reason in reasons.items() if not reason), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def render(report: dict[str, Any], console: Console) -> None:
    """Prints the report as tables."""
    console.print(_versions(report))
    gpus = report["gpus"]
    if gpus:
        console.print(_gpus(gpus))
    if report["gpu_note"]:
        console.print(f"GPUs: {report['gpu_note']}", highlight=False)
    if len(gpus) > 1:
        console.print(_peers(report["peer_access"]))
    symmetric = report["symmetric_memory"]
    console.print(f"Symmetric memory: {symmetric['reason'] or 'available'}", highlight=False)
    built = ", ".join(report["built_archs"]) or "none"
    found = ", ".join(dict.fromkeys(gpu["arch"] for gpu in gpus)) or "none"
    console.print(f"GPU architectures: built {built}; found {found}", highlight=False)
    console.print(f"mega and staged take {report['kernels_take']}; the reference runs the rest", highlight=False)
    console.print(report["transport_rule"], highlight=False)
    console.print(_backends(report["devices"]))


def _versions(report: dict[str, Any]) -> Table:
    table = Table("what", "version", title="Versions")
    for name, version in report["versions"].items():
        table.add_row(name, version or "-")
    for name, key in (("native library", "native_library"), ("CUDA kernels", "cuda_library")):
        library = report[key]
        table.add_row(name, f"loaded, {library['path']}" if library["loaded"] else library["reason"])
    return table


def _gpus(gpus: list[dict[str, Any]]) -> Table:
    table = Table("GPU", "name", "arch", "memory", "SMs", title="GPUs")
    for gpu in gpus:
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        table.add_row(str(gpu["index"]), gpu["name"], gpu["arch"], memory, str(gpu["multiprocessors"]))
    return table


def _peers(rows: list[list[bool]]) -> Table:
    table = Table("from \\ to", *(str(index) for index in range(len(rows))), title="Peer access")
    for index, row in enumerate(rows):
        table.add_row(str(index), *("yes" if reachable else "no" for reachable in row))
    return table


def _answer(name: str, reason: str, automatic: str | None) -> str:
    if reason:
        return f"no: {reason}"
    if name != automatic:
        return "yes, if asked for"
    return "yes, auto takes it" + (" if all ranks can share memory" if name == "peer" else "")


def _backends(devices: list[dict[str, Any]]) -> Table:
    table = Table("device", "kind", "name", "would it be used?", title="Backends and transports")
    for choices in devices:
        for kind in ("backend", "transport"):
            automatic = choices[f"auto_{kind}"]
            for name, reason in choices[f"{kind}s"].items():
                table.add_row(choices["device"], kind, name, _answer(name, reason, automatic))
        table.add_section()
    return table
