"""Any layer against the oracle: y and every gradient, two steps on poisoned memory, with h saved and recomputed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from tests.property.strategies import SMOOTH, layers
from tests.steps import ALL_DTYPES, Results, assert_same_bits, expected_step, run_step

from moe_megakernel.testing import LayerInputs, poisoned_memory

#: Errors relative to the norm of the result, or to that of as many terms of order 1 where sums cancel.
ERRORS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_near(results: Results, expected: Results, dtype: torch.dtype) -> None:
    hidden = 1 if results["y"] is None else results["y"].shape[1]
    for name, tensor in results.items():
        want = expected[name]
        assert tensor is not None
        assert want is not None
        assert tensor.shape == want.shape
        terms = hidden if name == "topk_weights" else 1  # a product of two vectors of that length
        scale = max(float(want.norm()), float(terms * (want != 0).sum()) ** 0.5)
        difference = float((tensor.double() - want).norm())
        assert difference <= ERRORS[dtype] * scale, f"{name}: {difference:.3e} of {scale:.3e} in {dtype}"


def check(inputs: LayerInputs) -> None:
    with poisoned_memory():
        first, second = run_step(inputs), run_step(inputs)
        recomputed = run_step(inputs, recompute=True)
    assert_same_bits(second, first)
    assert_same_bits(recomputed, first)
    assert_near(first, expected_step(inputs), inputs.x.dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layers((torch.float64, torch.float32)))
def test_against_the_oracle(inputs: LayerInputs) -> None:
    check(inputs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layers((torch.bfloat16, torch.float16), SMOOTH, least_width=8))
def test_against_the_oracle_in_half_precision(inputs: LayerInputs) -> None:
    """Activations without a limit: where h is rounded across it, the derivative jumps."""
    check(inputs)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layers(tuple(ALL_DTYPES)))
def test_recompute_and_inference_keep_the_bits(inputs: LayerInputs) -> None:
    with poisoned_memory():
        saved, recomputed = run_step(inputs), run_step(inputs, recompute=True)
        with torch.no_grad():
            inference = inputs.call()
    assert_same_bits(recomputed, saved)
    assert_same_bits({"y": inference}, {"y": saved["y"]})
