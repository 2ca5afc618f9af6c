"""Cases A26 and A27: machines without a GPU or without the native library, foreign GPUs, checkpoint layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.steps import assert_same_bits

from moe_megakernel import backends, convert
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

#: Runs a step and prints whether CUDA was initialised by the import, whether by the step, and the sum of y.
SCRIPT = """
import torch
import moe_megakernel
from moe_megakernel import _native
from moe_megakernel.testing import make_inputs, random_routing
imported = torch.cuda.is_initialized()
torch.set_num_threads(1)
leaves = make_inputs(random_routing(8, 4, 2, drop=0.2), bias=True).leaves()
y = leaves.call()
y.sum().backward()
total = sum(float(t.sum()) for t in (y.detach(), *leaves.grads().values()))
moe_megakernel.check_errors()
print(imported, torch.cuda.is_initialized(), _native.why_missing() is None, total.hex())
"""


def run_script(script: str = SCRIPT, **environment: str) -> list[str]:
    """The words that a fresh process prints."""
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a26_import_and_step_without_gpu_and_without_library() -> None:
    """Importing never initialises CUDA, a CPU step never does, and a missing library changes no bit."""
    whole = run_script(CUDA_VISIBLE_DEVICES="")
    without = run_script(CUDA_VISIBLE_DEVICES="", MOE_MEGAKERNEL_LIBRARY="/nonexistent/libmoe_megakernel.so")
    assert whole[:2] == without[:2] == ["False", "False"]
    assert without[2] == "False"
    assert whole[3] == without[3]


def test_a26_a_library_that_does_not_load_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "libmoe_megakernel.so"
    path.write_bytes(b"not a library")
    assert run_script(MOE_MEGAKERNEL_LIBRARY=str(path))[2] == "False"


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 1), (9, 0)])
@pytest.mark.parametrize("name", ["mega", "staged"])
def test_a26_foreign_architecture(name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what was built and what was found; "auto" falls back to what runs there."""
    found = f"sm_{capability[0]}{capability[1]}"
    monkeypatch.setattr(backends, "built_capabilities", lambda: ())
    with pytest.raises(ValueError, match=f"backend: expected one usable here .*, got '{name}': .* found {found}"):
        backends.select_backend(name, "cuda", capability)
    assert backends.select_backend("auto", "cuda", capability) == "reference"
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    if capability == (9, 0):
        assert backends.select_backend(name, "cuda", capability) == name
        assert backends.select_backend("auto", "cuda", capability) == "mega"
    else:
        with pytest.raises(ValueError, match=f"kernels are built for sm_90, found {found}"):
            backends.select_backend(name, "cuda", capability)
        assert backends.select_backend("auto", "cuda", capability) == "reference"


@pytest.mark.parametrize("name", ["mega", "staged"])
def test_a26_kernels_on_cpu_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"backend: .*\(reference\), got '{name}': needs a CUDA device, found cpu"):
        make_inputs(random_routing(8, 4, 2)).call(backend=name)


def layouts(inputs: LayerInputs) -> dict[str, dict[str, torch.Tensor]]:
    """The same parameters as checkpoints (a) per expert and (b) stacked, written without the converters."""
    per_expert: dict[str, torch.Tensor] = {}
    for e in range(inputs.num_experts):
        gate, up = inputs.w_gate_up[e].chunk(2)
        tensors = {"gate_proj": gate, "up_proj": up, "down_proj": inputs.w_down[e]}
        per_expert |= {f"experts.{e}.{name}.weight": tensor.clone() for name, tensor in tensors.items()}
    stacked = {"experts.gate_up_proj": inputs.w_gate_up.clone(), "experts.down_proj": inputs.w_down.clone()}
    return {"per_expert": per_expert, "stacked": stacked}


def test_a27_checkpoint_layouts() -> None:
    """Both layouts give equal outputs, round trips are bit-equal, and a missing expert is an error."""
    inputs = make_inputs(random_routing(8, 4, 2), dtype=torch.bfloat16)
    pairs = {
        "per_expert": (convert.from_per_expert, partial(convert.to_per_expert, num_experts=4)),
        "stacked": (convert.from_stacked, convert.to_stacked),
    }
    expected = inputs.call()
    for name, checkpoint in layouts(inputs).items():
        read, write = pairs[name]
        parameters = read(checkpoint, num_experts=4)
        y = torch.ops.moe.dispatch_gemm_combine(
            inputs.x, inputs.topk_idx, inputs.topk_weights, **parameters, num_experts=4
        )
        assert_equal_bits(y, expected, name)
        assert_same_bits(dict(write(parameters)), dict(checkpoint))  # type: ignore[operator]
    broken = layouts(inputs)["per_expert"]
    del broken["experts.2.up_proj.weight"]
    for strict in (True, False):
        with pytest.raises(convert.CheckpointKeyError, match=r"experts\.2\.up_proj\.weight"):
            convert.from_per_expert(broken, num_experts=4, strict=strict)
