"""`moe-megakernel train --device cuda`: the losses of four ranks, which may share a GPU, are those of one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moe_megakernel

pytestmark = [pytest.mark.gpu, pytest.mark.distributed, pytest.mark.usefixtures("kernels")]

STEPS = 20


def losses(out: Path, ranks: int) -> list[float]:
    """Bits per byte of every step of a run on a source of the standard library."""
    source = Path(os.__file__).parent / "argparse.py"
    options = {"device": "cuda", "dtype": "bfloat16", "backend": "mega", "ranks": ranks, "steps": STEPS, "out": out}
    options |= {"hidden": 128, "expert-width": 64, "experts": 6, "top-k": 2, "layers": 2, "checkpoint-every": 0}
    command = [sys.executable, "-m", "moe_megakernel", "train", "--no-compile", "--text", str(source)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    state = json.loads((out / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    return state["history"]["loss"]


def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """The layer's bits do not; cuBLAS rounds the dense parts by the shape of each rank's batch, so losses drift."""
    for module in ("typer", "rich", "matplotlib", "safetensors"):
        pytest.importorskip(module)
    assert moe_megakernel.backend_for(128, 64, 6).backend == "mega"
    one, four = losses(tmp_path / "one", 1), losses(tmp_path / "four", 4)
    assert len(one) == STEPS
    assert four[0] == pytest.approx(one[0], rel=1e-3)
    assert four == pytest.approx(one, rel=1e-2)
    assert sum(one[-5:]) < 0.9 * sum(one[:5]), "it has not learned"
