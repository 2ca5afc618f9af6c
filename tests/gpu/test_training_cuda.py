"""A small language model trained on the device: the fused kernels' losses beside the reference backend's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.layers import GPU

pytestmark = GPU

STEPS, LAST = 200, 50


def losses(out: Path, backend: str) -> list[float]:
    """Bits per byte of every step of a run on sources of the standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    options = {"device": "cuda", "dtype": "bfloat16", "backend": backend, "ranks": 1, "steps": STEPS, "out": out}
    options |= {"hidden": 128, "expert-width": 128, "experts": 8, "top-k": 2, "layers": 2, "checkpoint-every": 0}
    command = [sys.executable, "-m", "moe_megakernel", "train", "--no-compile"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command += [part for source in sources for part in ("--text", str(source))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    state = json.loads((out / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    return state["history"]["loss"]


@pytest.mark.parametrize("backend", ["mega"])
def test_training_goes_as_with_the_reference(backend: str, tmp_path: Path) -> None:
    """The means of the last steps agree within 1 %: the two round differently, and so drift apart step by step."""
    means = {}
    for name in (backend, "reference"):
        run = losses(tmp_path / name, name)
        assert len(run) == STEPS
        means[name] = sum(run[-LAST:]) / LAST
        assert means[name] < 0.7 * run[0], f"{name} has not learned"
    assert means[backend] == pytest.approx(means["reference"], rel=1e-2)
