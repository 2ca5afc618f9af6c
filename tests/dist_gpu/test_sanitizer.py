"""Two ranks' kernels under compute-sanitizer: no access outside of what they share, and no wrong barrier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.usefixtures("kernels", "_no_mps")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_small_layers_are_clean(tool: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
    command = [program, *options, sys.executable, "-m", "tests.dist_gpu.sanitized"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "fewer experts than ranks" in done.stdout
