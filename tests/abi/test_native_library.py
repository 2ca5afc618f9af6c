"""Proves that the C++ libraries see only torch's stable ABI: one binary loads on torch >= 2.10 and on any Python.

Reads the files with binutils - that with the CUDA kernels too, where it has been built, since no GPU is needed for
that - and loads the one for CPU tensors in a fresh process as a user does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_megakernel import _native

# What may stay undefined: torch's C shim, and what the C++ and C run-times export with a version.
SHIM = re.compile(r"(aoti_torch_|torch_)[a-z0-9_]+")
RUNTIME = re.compile(r".*@@?(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+")
# Weak references that compilers add to every shared library.
COMPILER_WEAK = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}


def _tool(name: str, *arguments: str) -> str:
    if sys.platform != "linux":
        pytest.skip("the library is an ELF file on Linux only")
    if shutil.which(name) is None:
        pytest.skip(f"{name} (binutils) is not installed")
    command = [name, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def library() -> Path:
    assert _native.load(), _native.why_missing()
    path = _native.library_path()
    assert path is not None
    return path


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def built(request: pytest.FixtureRequest, library: Path) -> Path:
    """Return the library for CPU tensors, then the one with the CUDA kernels."""
    if request.param == "cpu":
        return library
    found = next((path for path in _native._cuda._candidates(library) if path.is_file()), None)
    if found is None:
        pytest.skip("the library with the CUDA kernels is not built here")
    return found


@pytest.fixture(scope="module")
def dynamic_section(built: Path) -> dict[str, list[str]]:
    """Return tag -> names, as in {"NEEDED": ["libtorch.so", ...]}."""
    entries: dict[str, list[str]] = {}
    for tag, name in re.findall(r"\((\w+)\).*\[(.*)\]", _tool("readelf", "--dynamic", "--wide", str(built))):
        entries.setdefault(tag, []).append(name)
    return entries


@pytest.fixture(scope="module")
def undefined_symbols(built: Path) -> list[str]:
    """Return the demangled names, with versions, that the dynamic loader must find elsewhere."""
    listing = _tool("nm", "--dynamic", "--undefined-only", "--demangle", str(built))
    symbols = [line.split(maxsplit=1)[1] for line in listing.splitlines() if line.strip()]
    assert symbols
    return symbols


def test_no_symbol_of_the_unstable_abi_is_undefined(undefined_symbols: list[str]) -> None:
    unstable = re.compile(r"\b(at|c10|caffe2|torch)::|^_?Py[A-Z_]|\bpybind11::")
    assert not [symbol for symbol in undefined_symbols if unstable.search(symbol)]


def test_every_undefined_symbol_belongs_to_the_shim_or_the_run_times(undefined_symbols: list[str]) -> None:
    foreign = [
        symbol
        for symbol in undefined_symbols
        if not SHIM.fullmatch(symbol) and not RUNTIME.fullmatch(symbol) and symbol.split("@")[0] not in COMPILER_WEAK
    ]
    assert not foreign
    assert any(SHIM.fullmatch(symbol) for symbol in undefined_symbols)


def test_it_exports_nothing_of_torch_or_its_own(built: Path) -> None:
    """Hidden visibility: two libraries built on different torch headers cannot mix their inline functions."""
    listing = _tool("nm", "--dynamic", "--defined-only", "--demangle", str(built))
    exported = [line.split(maxsplit=2)[2] for line in listing.splitlines() if line.strip()]
    assert not [name for name in exported if re.search(r"\b(moe|torch|at|c10|cutlass|cute)::|^cuda", name)]
    assert " u " not in listing  # a unique symbol would be shared between libraries all the same


def test_it_needs_libtorch_and_no_python(dynamic_section: dict[str, list[str]]) -> None:
    needed = dynamic_section["NEEDED"]
    assert {"libtorch.so", "libtorch_cpu.so"} <= set(needed)
    assert not [name for name in needed if re.match(r"lib(python|torch_python|c10|cudart|cuda|nvrtc)", name)]


def test_it_shares_the_cxx_run_time_with_libtorch(built: Path, undefined_symbols: list[str]) -> None:
    """With a copy of its own (libstdc++.a) the first exception that crosses into libtorch crashes the process."""
    assert [symbol for symbol in undefined_symbols if symbol.startswith("__cxa_throw@")]
    assert "__cxa_throw" not in _tool("nm", "--dynamic", "--defined-only", str(built))


def test_it_has_no_run_path(dynamic_section: dict[str, list[str]]) -> None:
    assert "RPATH" not in dynamic_section
    assert "RUNPATH" not in dynamic_section


def test_it_holds_no_path_of_the_machine_that_built_it(built: Path) -> None:
    held = built.read_bytes()
    for name in (str(Path(__file__).resolve().parents[2]), "site-packages", "dist-packages", "/usr/local/cuda"):
        assert name.encode() not in held


def test_error_messages_name_files_relative_to_the_repository() -> None:
    import torch

    with pytest.raises(
        RuntimeError, match=r"(^|\s)kernels/bindings/route_arguments\.h:\d+, moe::route: topk_idx: expected"
    ):
        torch.ops.moe.route(torch.zeros(1, 1), 1)


def _fresh_process(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_it_loads_in_a_fresh_process_without_a_device(library: Path) -> None:
    code = (
        "import torch, moe_megakernel\n"
        "from moe_megakernel import _native\n"
        "assert _native.load() and _native.load(), _native.why_missing()\n"
        "assert _native.why_missing() is None\n"
        "order, counts, first_bad = torch.ops.moe.route(torch.tensor([[1, 0], [-1, 1]]), 2)\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(order.tolist(), counts.sum().item(), first_bad.tolist(), _native.library_path())\n"
    )
    printed = _fresh_process(code, CUDA_VISIBLE_DEVICES="")
    assert printed == f"[1, 0, 3, -1] 3 [-1] {library}"


def test_the_named_library_is_the_one_loaded(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.so"
    shutil.copy(library, copy)
    code = "import moe_megakernel._native as n; print(n.load(), n.library_path())"
    assert _fresh_process(code, MOE_MEGAKERNEL_LIBRARY=str(copy)) == f"True {copy}"


@pytest.mark.parametrize("kind", ["absent", "not a library"])
def test_import_works_without_the_library_and_says_why(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "libmoe_megakernel.so"
    if kind == "not a library":
        path.write_bytes(b"no ELF file")
    code = (
        "import torch, moe_megakernel\n"
        "from moe_megakernel import _native\n"
        "assert torch.ops.moe.route(torch.tensor([[1, 0], [-1, 1]]), 2)[0].tolist() == [1, 0, 3, -1]\n"
        "print(_native.load(), _native.library_path(), _native.why_missing())\n"
    )
    printed = _fresh_process(code, MOE_MEGAKERNEL_LIBRARY=str(path))
    expected = f"no such file: {path}" if kind == "absent" else f"{path} does not load: "
    assert printed.startswith(f"False None {expected}")
