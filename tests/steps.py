"""One training step of the layer and its comparison with the float64 oracle, as every case of the suite does it.

`check_step` is what most cases call: poisoned memory, two steps whose bits must agree, and y and all gradients by
relative Frobenius error against `moe_megakernel.testing.oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_megakernel.testing import (
    BF16_FORWARD,
    BF16_GRADIENT,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    oracle,
    poisoned_memory,
)

#: Relative error allowed for (y, gradients) against float64, by storage dtype.
TOLERANCES = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (1e-3, 2e-3),
    torch.bfloat16: (BF16_FORWARD, BF16_GRADIENT),
}
ALL_DTYPES = list(TOLERANCES)
#: Activation, its options, as keyword arguments of `make_inputs`.
ACTIVATION_CASES: list[dict[str, Any]] = [
    {"activation": "swiglu"},
    {"activation": "swiglu", "limit": 0.75},
    {"activation": "swiglu_oai"},
    {"activation": "swiglu_oai", "alpha": 0.9, "limit": 1.25},
    {"activation": "geglu_tanh"},
    {"activation": "geglu_erf"},
    {"activation": "geglu"},
    {"activation": "relu2"},
]
Results = dict[str, Tensor | None]


def name_of(case: Any) -> str:
    """Test id of a dtype or of an activation case."""
    if isinstance(case, torch.dtype):
        return str(case).removeprefix("torch.")
    return "-".join(str(v) for v in case.values()) if isinstance(case, dict) else str(case)


def make_dy(y: Tensor, seed: int = 1) -> Tensor:
    """A gradient of y at order 1, from a seed, like y."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)


def run_step(
    inputs: LayerInputs,
    call: Callable[..., Tensor] | None = None,
    *,
    dy: Tensor | None = None,
    requires_grad: dict[str, bool] | None = None,
    **options: Any,
) -> Results:
    """Forward and backward on fresh leaves: y and every gradient by name.

    Args:
        inputs: values; left alone.
        call: (leaves, **options) -> y; by default the op.
        dy: gradient of y, by default `make_dy`.
        requires_grad: `name=False` freezes an input.
        options: of the op.
    """
    leaves = inputs.leaves(**(requires_grad or {}))
    y = (LayerInputs.call if call is None else call)(leaves, **options)
    y.backward(make_dy(y) if dy is None else dy)
    return {"y": y.detach(), **leaves.grads()}


def expected_step(
    inputs: LayerInputs, *, dy: Tensor | None = None, oracle: Callable[[LayerInputs], Tensor] = oracle
) -> Results:
    """What `run_step` must give for these values, by the oracle in float64."""
    dy = make_dy(inputs.x) if dy is None else dy
    # The added zero keeps the graph where no token has a route.
    results = run_step(inputs.to(torch.float64), lambda leaves: oracle(leaves) + 0 * leaves.x, dy=dy.double())
    for name in inputs.grads():
        if results[name] is None:  # no route reads it
            results[name] = torch.zeros_like(getattr(inputs, name), dtype=torch.float64)
    return results


def assert_same_bits(actual: Results, expected: Results) -> None:
    """Equal names, equal bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert_equal_bits(tensor, expected[name], name)


def assert_near(actual: Results, expected: Results, dtype: torch.dtype) -> None:
    """Relative errors within the budget of the storage dtype; gradients have their input's dtype and shape."""
    assert actual.keys() == expected.keys()
    forward, backward = TOLERANCES[dtype]
    for name, tensor in actual.items():
        assert_close(tensor, expected[name], forward if name == "y" else backward, name)


def check_step(inputs: LayerInputs, **options: Any) -> Results:
    """Two steps on poisoned memory with equal bits, all results against the oracle; returns them."""
    with poisoned_memory():
        first = run_step(inputs, **options)
        second = run_step(inputs, **options)
    assert_same_bits(second, first)
    assert_near(first, expected_step(inputs), inputs.x.dtype)
    for name, gradient in first.items():
        if name != "y" and gradient is not None:
            assert gradient.dtype == getattr(inputs, name).dtype, name
    return first
