"""The fused kernels under the tools of compute-sanitizer: no access outside of memory, no race, no wrong barrier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from tests.gpu.layers import GPU

pytestmark = GPU


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_small_layers_are_clean(tool: str) -> None:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer, which comes with the CUDA toolkit")
    # Every tensor an allocation of its own, so that its end is watched too.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.sanitized"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "one expert" in done.stdout
