"""Case A07 on the fused kernels: widths that fit no tile, and calls that they hand to the reference backend."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, check_layer, on_device, oracle_by_expert
from tests.steps import assert_near, assert_same_bits, expected_step, name_of, run_step

from moe_megakernel.testing import LayerInputs, make_inputs, poisoned_memory, random_routing

pytestmark = GPU


@pytest.mark.parametrize("hidden", [2880, 1032, 200, 72, 8])
def test_a07_hidden_width(hidden: int) -> None:
    check_layer(make_inputs(random_routing(24, 4, 2), hidden, 64))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("width", [8, 72, 200, 1032])
def test_a07_expert_width(width: int, activation: str) -> None:
    check_layer(make_inputs(random_routing(24, 4, 2), 64, width, activation=activation, bias=True))


@pytest.mark.parametrize("top_k", [3, 6, 12])
@pytest.mark.parametrize("hidden", [1024, 1536, 1544, 2056, 4104])
def test_combine_of_wide_rows(hidden: int, top_k: int) -> None:
    """A warp sums 1536 columns at a time, with more than four routes a token 1024."""
    check_layer(make_inputs(random_routing(33, 16, top_k, drop=0.1), hidden, 64, 16, bias=True))


def check_fallback(inputs: LayerInputs, backend: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked by name, the first of several calls warns with `reason`; results are the reference's, and right."""
    monkeypatch.setattr("moe_megakernel.hopper.support._warned", set())
    with poisoned_memory(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [run_step(inputs, backend=backend) for _ in range(2)]
    texts = [str(w.message) for w in caught if "dispatch_gemm_combine" in str(w.message)]
    assert len(texts) == 1, texts
    assert reason in texts[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dispatch_gemm_combine")
        automatic, reference = run_step(inputs), run_step(inputs, backend="reference")
    for other in (results[1], automatic, reference):
        assert_same_bits(other, results[0])
    assert_near(results[0], expected_step(inputs, oracle=oracle_by_expert), inputs.x.dtype)


@pytest.mark.parametrize(("hidden", "width"), [(1025, 64), (7, 64), (64, 33), (64, 1)])
@both_backends
def test_a07_widths_that_fall_back(backend: str, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_device(make_inputs(random_routing(24, 4, 2), hidden, width, bias=True))
    check_fallback(inputs, backend, "multiples of 8", monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name_of)
@both_backends
def test_dtypes_that_fall_back(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(random_routing(24, 4, 2), bias=True).to(dtype, "cuda")
    check_fallback(inputs, backend, f"got {name_of(dtype)}", monkeypatch)


def test_too_many_experts_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_device(make_inputs(random_routing(24, 1025, 4), 64, 32, 1025))
    check_fallback(inputs, "mega", "got 1025", monkeypatch)


def test_no_gradient_of_what_is_frozen() -> None:
    inputs = on_device(make_inputs(random_routing(24, 4, 2), 72, 40, bias=True))
    full = run_step(inputs, backend="mega")
    frozen = {"w_gate_up": False, "w_down": False, "bias_down": False}
    results = run_step(inputs, requires_grad=frozen, backend="mega")
    assert [n for n, g in results.items() if g is None] == ["w_gate_up", "w_down", "bias_down"]
    kept = {n: g for n, g in results.items() if g is not None}
    assert_same_bits(kept, {n: full[n] for n in kept})
