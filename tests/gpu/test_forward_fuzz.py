"""Layers that nobody thought of: small shapes, Zipf routing, dropped routes and repeats, against float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.gpu.layers import GPU, KERNELS, kernel_step, on_device, oracle_by_expert
from tests.property.strategies import KINDS, SMOOTH, make_routing
from tests.property.test_layer import assert_near
from tests.steps import assert_same_bits, expected_step

from moe_megakernel.testing import LayerInputs, make_inputs

pytestmark = GPU

WIDTHS = [8, 16, 40, 64, 72, 128, 136, 264, 392]


@st.composite
def layers(draw: st.DrawFn) -> LayerInputs:
    """T 0 to 300, K 1 to 10, E 1 to 40; H and I are multiples of 8, as the kernels take them."""
    tokens, top_k, experts = draw(st.integers(0, 300)), draw(st.integers(1, 10)), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["zipf", "zipf", *KINDS]))
    drop, seed = draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])), draw(st.integers(0, 2**16))
    ids = make_routing(kind, tokens, experts, top_k, drop, seed)
    case: dict[str, Any] = draw(st.sampled_from(SMOOTH))
    return make_inputs(
        ids.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        draw(st.sampled_from(WIDTHS)),
        draw(st.sampled_from(WIDTHS)),
        experts,
        bias=draw(st.booleans()),
        seed=seed,
        **case,
    )


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(layers())
def test_any_layer(inputs: LayerInputs) -> None:
    inputs = on_device(inputs)
    mega, staged = (kernel_step(inputs, backend) for backend in KERNELS)
    assert_same_bits(staged, mega)
    assert_near(mega, expected_step(inputs, oracle=oracle_by_expert), torch.bfloat16)
