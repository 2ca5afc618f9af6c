"""Numbers of the fused kernels: activations, biases, tokens, experts, routes, and the combine's rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.layers import GPU, KERNELS, both_backends, check_layer, on_device
from tests.steps import assert_same_bits, name_of, run_step

from moe_megakernel.testing import (
    BF16_FORWARD,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    random_routing,
)

pytestmark = GPU

#: Limits that no bfloat16 number equals: at a limit the derivative depends on the version of torch.
ACTIVATIONS: list[dict[str, Any]] = [
    {"activation": "swiglu"},
    {"activation": "swiglu", "limit": 0.7},
    {"activation": "swiglu_oai"},
    {"activation": "swiglu_oai", "alpha": 0.9, "limit": 1.3},
    {"activation": "geglu_tanh"},
    {"activation": "geglu_erf"},
    {"activation": "relu2"},
]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("case", ACTIVATIONS, ids=name_of)
def test_activations(case: dict[str, Any], bias: bool) -> None:
    check_layer(make_inputs(random_routing(200, 6, 3, zipf=1.0, drop=0.1), 136, 200, 6, bias=bias, **case))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_whole_tiles(activation: str) -> None:
    ids = torch.arange(4).repeat_interleave(256)[torch.randperm(1024, generator=torch.Generator().manual_seed(0))]
    check_layer(make_inputs(ids[:, None], 512, 512, 4, bias=True, activation=activation))


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 1000])
def test_tokens(tokens: int) -> None:
    check_layer(make_inputs(random_routing(tokens, 8, 2, zipf=1.0), 128, 128, 8, bias=True))


@pytest.mark.parametrize("experts", [1, 3, 128, 257, 1024])
def test_experts(experts: int) -> None:
    """With few experts a token names one of them more than once."""
    check_layer(make_inputs(random_routing(96, experts, 8, zipf=0.7), 72, 64, experts))


@pytest.mark.parametrize("experts", [4, 40])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 10, 33])
def test_routes_of_a_token(top_k: int, experts: int) -> None:
    check_layer(make_inputs(random_routing(50, experts, top_k, drop=0.1), 128, 64, experts, bias=True))


@pytest.mark.parametrize("hidden", [256, 1040])
def test_one_bias_without_the_other(hidden: int) -> None:
    inputs = make_inputs(random_routing(40, 4, 2), hidden, 128, bias=True)
    check_layer(replace(inputs, bias_gate_up=None))
    check_layer(replace(inputs, bias_down=None))


def test_expert_of_many_minibatches() -> None:
    """More row tiles than ring slots, one expert much longer than the others."""
    check_layer(make_inputs(random_routing(1300, 5, 5, zipf=1.0, drop=0.05), 64, 136, 5))


@both_backends
def test_a13_cancelling_outputs(backend: str) -> None:
    """Expert outputs 1, 2^-9, -1: the sum is 2^-9; a running sum in bfloat16 is 0."""
    inputs = on_device(make_inputs(torch.tensor([[0, 1, 2]]).repeat(8, 1), num_experts=3, bias=True))
    outputs = torch.tensor([1, 2**-9, -1], dtype=torch.bfloat16, device="cuda")[:, None].expand(3, 64)
    sums = replace(
        inputs,
        topk_weights=torch.ones_like(inputs.topk_weights),
        w_down=torch.zeros_like(inputs.w_down),
        bias_down=outputs.contiguous(),
    )
    y = sums.call(backend=backend)
    assert_equal_bits(y, torch.full_like(y, 2**-9))


@pytest.mark.parametrize("top_k", [3, 8, 10, 33])
@both_backends
def test_a13_one_rounding_of_the_sum(backend: str, top_k: int) -> None:
    """y is the float32 sum over k, ascending, of rounded products of the rounded rows, rounded once: bit for bit."""
    inputs = on_device(make_inputs(torch.arange(top_k).repeat(70, 1), 136, 64, num_experts=top_k, bias=True))
    total = torch.zeros(70, 136, device="cuda")
    for k in range(top_k):
        alone = replace(
            inputs, topk_idx=inputs.topk_idx[:, k : k + 1], topk_weights=torch.ones_like(inputs.topk_weights[:, :1])
        )
        total += alone.call(backend=backend).float() * inputs.topk_weights[:, k : k + 1]
    assert_equal_bits(inputs.call(backend=backend), total.to(torch.bfloat16), "y")


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@both_backends
def test_routing_weights_of_every_dtype_and_size(backend: str, weights: torch.dtype) -> None:
    """Zero, negative, tiny and large weights; bfloat16 and float16 are widened."""
    inputs = on_device(make_inputs(random_routing(64, 4, 2), bias=True))
    values = torch.tensor([0.0, -0.5, 2.0, 1e-30, 1.0, -3.0, 0.0, 100.0]).repeat(16).view(64, 2)
    given = replace(inputs, topk_weights=values.to("cuda", weights))
    wide = replace(inputs, topk_weights=given.topk_weights.float())
    results, expected = run_step(given, backend=backend), run_step(wide, backend=backend)
    assert expected["topk_weights"] is not None
    expected["topk_weights"] = expected["topk_weights"].to(weights)
    assert_same_bits(results, expected)
    assert_close(results["y"], wide.to(torch.float32).call(backend="reference"), BF16_FORWARD, "y")


def test_auto_takes_mega() -> None:
    inputs: LayerInputs = on_device(make_inputs(random_routing(64, 4, 2)))
    by_name = {backend: inputs.call(backend=backend) for backend in (*KERNELS, "auto")}
    assert_equal_bits(by_name["auto"], by_name["mega"])
