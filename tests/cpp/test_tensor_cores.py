"""The compiler's own words about the kernels: products of the tensor cores overlap, and registers suffice."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTANCES = sorted((ROOT / "kernels" / "forward" / "instances").glob("*.cu"))
#: Bytes of spilled registers that a kernel's single-warp roles may have; the computing ones have none in their loops.
MOST_SPILLED = 256


def cutlass() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no CUTLASS headers (nvidia-cutlass)")
    return Path(spec.submodule_search_locations[0]) / "source" / "include"


@pytest.mark.slow
@pytest.mark.parametrize("instance", INSTANCES, ids=lambda path: path.stem)
def test_products_are_not_serialised(instance: Path, tmp_path: Path) -> None:
    """With C7510 to C7519 ptxas tells that it waits for each wgmma: right numbers, a tenth slower, nothing fails."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    flags = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v"]
    folders = [f"-I{ROOT}", f"-I{ROOT / 'kernels'}", f"-I{ROOT / 'kernels' / 'include'}", "-isystem", str(cutlass())]
    command = [nvcc, *flags, *folders, "-c", str(instance), "-o", str(tmp_path / "instance.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    words = done.stdout + done.stderr
    assert done.returncode == 0, words
    assert re.findall(r"C75\d\d", words) == [], words
    assert "warning" not in words, words
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", words)]
    assert spilled, words
    assert max(spilled) <= MOST_SPILLED, words
