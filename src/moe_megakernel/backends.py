"""Which implementation runs a call: the backend (kernels) and the transport (how rows travel between ranks).

Pure look-ups from device type and compute capability to usable names, so that they can be tested without a GPU. Called
by the ops, which pass the chosen names on to the inner ops, and by the doctor command. Whether the ranks of a group can
share memory is not known here: they find out together (`hopper.peer`).
"""

from __future__ import annotations

from functools import lru_cache

from . import _native

BACKENDS = ("mega", "staged", "reference")
TRANSPORTS = ("peer", "collective")

_KERNELS_FOR: tuple[tuple[int, int], ...] = ((9, 0),)


def built_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capabilities that there are kernels for in this process: none unless their library is loaded."""
    return _KERNELS_FOR if _native.cuda_library_path() is not None else ()


def _capability_text(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def available_backends(device_type: str, capability: tuple[int, int] | None = None) -> dict[str, str]:
    """Says for every backend why it cannot run on such a device, or "" where it can.

    Args:
        device_type: "cpu" or "cuda".
        capability: compute capability of the CUDA device, for instance (9, 0); None where there is none.
    """
    return _available_backends(device_type, capability, built_capabilities())


def _available_backends(
    device_type: str, capability: tuple[int, int] | None, capabilities: tuple[tuple[int, int], ...]
) -> dict[str, str]:
    built = ", ".join(_capability_text(c) for c in capabilities) or "no GPU architecture"
    kernels = ""
    if device_type != "cuda":
        kernels = f"needs a CUDA device, found {device_type}"
    elif capability not in capabilities:
        found = "an unknown one" if capability is None else _capability_text(capability)
        kernels = f"not in this build: kernels are built for {built}, found {found}"
    # On meta tensors the ops' fakes give shapes and dtypes.
    reference = "" if device_type in ("cpu", "cuda", "meta") else f"runs on cpu and cuda, found {device_type}"
    return {"mega": kernels, "staged": kernels, "reference": reference}


def available_transports(device_type: str) -> dict[str, str]:
    """Says for every transport why it cannot be used on such a device, or "" where it can.

    `peer` also needs a call that the kernels can run, and ranks that can share memory.
    """
    peer = "" if built_capabilities() else "not in this build (needs the CUDA kernels)"
    if device_type != "cuda":
        peer = "needs CUDA devices"
    return {"peer": peer, "collective": ""}


def _select(argument: str, asked: str, usable: dict[str, str]) -> str:
    if asked == "auto":
        for name, reason in usable.items():
            if not reason:
                return name
        raise ValueError(f"dispatch_gemm_combine: {argument}: expected a usable one, got none: {usable}")
    if asked not in usable:
        names = ", ".join(("auto", *usable))
        raise ValueError(f"dispatch_gemm_combine: {argument}: expected one of {names}, got {asked!r}")
    if usable[asked]:
        names = ", ".join(n for n, reason in usable.items() if not reason)
        raise ValueError(
            f"dispatch_gemm_combine: {argument}: expected one usable here ({names}), got {asked!r}: {usable[asked]}"
        )
    return asked


def select_backend(asked: str, device_type: str, capability: tuple[int, int] | None = None) -> str:
    """The backend that runs a call with `backend=asked`; "auto" takes the first usable of mega, staged, reference.

    Raises:
        ValueError: unknown name, or one that cannot run here (with the reason and what is usable).
    """
    return _select_backend(asked, device_type, capability, built_capabilities())


@lru_cache
def _select_backend(
    asked: str, device_type: str, capability: tuple[int, int] | None, capabilities: tuple[tuple[int, int], ...]
) -> str:
    return _select("backend", asked, _available_backends(device_type, capability, capabilities))


def select_transport(asked: str, device_type: str) -> str:
    """The transport of a call with `transport=asked`.

    "auto" stays "auto" where `peer` may be usable: the ranks of the group find out together, at its first call.

    Raises:
        ValueError: as in `select_backend`.
    """
    return _select_transport(asked, device_type, bool(built_capabilities()))


@lru_cache
def _select_transport(asked: str, device_type: str, built: bool) -> str:
    selected = _select("transport", asked, available_transports(device_type))
    return "auto" if asked == "auto" and selected == "peer" else selected
