"""`torch.compile` of calls that the fused kernels run: the bits of the eager call, for one graph and every T."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, on_device
from tests.steps import assert_same_bits, run_step
from torch import Tensor

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU

HIDDEN, WIDTH, EXPERTS, TOP_K = 72, 40, 6, 3


def layer(tokens: int) -> LayerInputs:
    ids = random_routing(tokens, EXPERTS, TOP_K, zipf=1.0, drop=0.1, seed=tokens)
    inputs = make_inputs(ids, HIDDEN, WIDTH, EXPERTS, bias=True)
    return on_device(replace(inputs, x=make_inputs(ids, HIDDEN, WIDTH, EXPERTS, seed=tokens).x))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def call_of(backend: str, dynamic: bool) -> object:
    """A compiled function of the leaves."""

    def op(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *parameters: Tensor) -> Tensor:
        return torch.ops.moe.dispatch_gemm_combine(
            x, topk_idx, topk_weights, *parameters, num_experts=EXPERTS, backend=backend
        )

    return torch.compile(op, fullgraph=True, dynamic=dynamic)


def compiled_step(function: object, inputs: LayerInputs) -> dict[str, Tensor | None]:
    def call(leaves: LayerInputs) -> Tensor:
        assert callable(function)
        parameters = (leaves.w_gate_up, leaves.w_down, leaves.bias_gate_up, leaves.bias_down)
        return function(leaves.x, leaves.topk_idx, leaves.topk_weights, *parameters)

    return run_step(inputs, call)


@both_backends
def test_static(backend: str) -> None:
    inputs = layer(33)
    function = call_of(backend, dynamic=False)
    for _ in range(2):
        assert_same_bits(compiled_step(function, inputs), run_step(inputs, backend=backend))


@both_backends
def test_one_graph_for_every_number_of_tokens(backend: str) -> None:
    function = call_of(backend, dynamic=True)
    assert_same_bits(compiled_step(function, layer(8)), run_step(layer(8), backend=backend))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (16, 33, 300):
            inputs = layer(tokens)
            assert_same_bits(compiled_step(function, inputs), run_step(inputs, backend=backend))


@both_backends
def test_without_gradients_between_other_operations(backend: str) -> None:
    inputs = layer(65)

    def block(x: Tensor) -> Tensor:
        return torch.relu(replace(inputs, x=2 * x).call(backend=backend)) + x

    with torch.no_grad():
        y = torch.compile(block, fullgraph=True)(inputs.x)
        assert_equal_bits(y, block(inputs.x))
