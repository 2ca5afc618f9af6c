"""Compiles the torch-free headers alone, runs the C++ tests beside this file, and keeps torch and CUDA out of the plan.

The compiler is given no include path but ``kernels/include``, and for programs and for ``cutlass_configs`` the
repository: what builds here builds for host and device alike. Where there is nvcc, it compiles the headers for the
architectures that kernels are, or will be, written for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "kernels" / "include"
HEADERS = sorted(INCLUDE.glob("moe/**/*.h"))
CONFIG_HEADERS = sorted((ROOT / "cutlass_configs").glob("*.h"))
PLAN_HEADERS = sorted(INCLUDE.glob("moe/plan/**/*.h"))
DEVICE_HEADERS = [*PLAN_HEADERS, *sorted(INCLUDE.glob("moe/forward/**/*.h"))]
PROGRAMS = sorted(Path(__file__).parent.glob("test_*.cpp"))
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-Wconversion", "-Wno-sign-conversion"]
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

_COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    if _COMPILER is None:
        pytest.skip("no C++ compiler: neither CXX nor c++, g++ or clang++")
    return _COMPILER.split()


def _run(command: list[str], **kwargs: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CPATH": "", "CPLUS_INCLUDE_PATH": "", "LC_ALL": "C", **kwargs}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)


def _relative(path: Path) -> str:
    return str(path.relative_to(INCLUDE if INCLUDE in path.parents else path.parent))


def test_there_is_something_to_test() -> None:
    assert PLAN_HEADERS
    assert PROGRAMS


@pytest.mark.parametrize("sanitized", [False, True], ids=["plain", "sanitized"])
@pytest.mark.parametrize("program", PROGRAMS, ids=_relative)
def test_program_passes(compiler: list[str], program: Path, sanitized: bool, tmp_path: Path) -> None:
    if sanitized:
        empty = tmp_path / "empty.cpp"
        empty.write_text("int main() { return 0; }\n")
        if _run([*compiler, *SANITIZE, str(empty), "-o", str(tmp_path / "empty")]).returncode != 0:
            pytest.skip(f"{compiler[0]} cannot link the address and undefined-behaviour sanitizers")
    binary = tmp_path / program.stem
    flags = [*STRICT, *(SANITIZE if sanitized else ["-O2"])]
    built = _run([*compiler, *flags, f"-I{INCLUDE}", f"-I{ROOT}", str(program), "-o", str(binary)])
    assert built.returncode == 0, built.stderr
    ran = _run([str(binary)], LD_PRELOAD="")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("header", PLAN_HEADERS, ids=_relative)
def test_plan_header_compiles_alone_and_reaches_no_torch_or_cuda(
    compiler: list[str], header: Path, tmp_path: Path
) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header.relative_to(INCLUDE)}"\n#include "{header.relative_to(INCLUDE)}"\n')
    built = _run([*compiler, *STRICT, f"-I{INCLUDE}", "-fsyntax-only", str(source)])
    assert built.returncode == 0, built.stderr
    listed = _run([*compiler, "-std=c++17", f"-I{INCLUDE}", "-M", str(source)])
    assert listed.returncode == 0, listed.stderr
    files = [Path(name).resolve() for name in listed.stdout.replace("\\\n", " ").split()[2:]]
    own = [file.relative_to(INCLUDE) for file in files if file.is_relative_to(INCLUDE)]
    assert header.relative_to(INCLUDE) in own
    assert {path.parts[:2] for path in own} <= {("moe", "plan"), ("moe", "host_device.h")}
    system = [str(file) for file in files if not file.is_relative_to(INCLUDE)]
    assert not [name for name in system if re.search(r"/(torch|ATen|c10|cuda\w*|cutlass|cute)(/|\.h$)", name)]


@pytest.mark.parametrize("header", CONFIG_HEADERS, ids=lambda path: path.name)
def test_configurations_compile_alone_and_reach_only_the_plan(
    compiler: list[str], header: Path, tmp_path: Path
) -> None:
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header.relative_to(ROOT)}"\n#include "{header.relative_to(ROOT)}"\n')
    built = _run([*compiler, *STRICT, f"-I{INCLUDE}", f"-I{ROOT}", "-fsyntax-only", str(source)])
    assert built.returncode == 0, built.stderr
    included = re.findall(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE)
    assert included
    assert all(name.startswith(("moe/plan/", "cutlass_configs/")) for name in included)


@pytest.mark.parametrize("architecture", ["90a", "100a"])
def test_headers_compile_for_device_code(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        pytest.skip("no nvcc: neither CUDACXX nor nvcc on PATH")
    source = tmp_path / "device.cu"
    lines = [f'#include "{header.relative_to(INCLUDE)}"' for header in DEVICE_HEADERS]
    lines += [
        "__global__ void probe(moe::Plan plan, moe::PlanMemory memory, std::int64_t* out) {",
        "  const moe::Problem problem = plan.problem;",
        "  const moe::Plan read = moe::plan_in_memory(memory, problem, plan.tiling, plan.schedule, plan.tokens, 1);",
        "  *out = read.num_tasks + moe::counter_offset(moe::Counter::kPulled, problem);",
        "}",
    ]
    source.write_text("\n".join(lines) + "\n")
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra"]
    built = _run(
        [nvcc, *flags, target, f"-I{INCLUDE}", f"-I{ROOT}", "-c", str(source), "-o", str(tmp_path / "device.o")]
    )
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize("header", HEADERS, ids=_relative)
def test_no_header_under_include_names_torch(header: Path) -> None:
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', header.read_text(), re.MULTILINE)
    assert not [name for name in included if re.match(r"(torch|ATen|c10|Python\.h|pybind11)", name)]
    if INCLUDE / "moe" / "plan" in header.parents or header.name == "host_device.h":
        assert not [name for name in included if re.match(r"(cuda|cutlass|cute)", name)]
