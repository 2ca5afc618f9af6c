"""`torch.compile` of whole training steps that the fused kernels run: the bits of eager steps, no graph break."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends
from tests.gpu.test_backward_needs import buffers
from tests.gpu.test_forward_compile import EXPERTS, layer
from tests.steps import assert_same_bits, make_dy, run_step
from torch import Tensor

from moe_megakernel.testing import LayerInputs, assert_equal_bits

pytestmark = GPU


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def loss_of(leaves: LayerInputs, dy: Tensor, **options: object) -> Tensor:
    """A step's loss, whose gradient of y is dy / 2."""
    return (leaves.call(**options).float() * dy.float()).sum() / 2


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@both_backends
def test_a17_training_step(backend: str, recompute: bool) -> None:
    function = torch.compile(loss_of, fullgraph=True)
    for tokens in (33, 70):
        inputs = layer(tokens)
        dy = make_dy(inputs.x)
        leaves = inputs.leaves()
        function(leaves, dy, backend=backend, recompute=recompute).backward()
        expected = run_step(inputs, dy=dy / 2, backend=backend)
        for name, gradient in leaves.grads().items():
            assert_equal_bits(gradient, expected[name], name)


@both_backends
def test_a17_main_gradients(backend: str) -> None:
    inputs = layer(33)
    dy = make_dy(inputs.x)
    compiled, eager = buffers(inputs), buffers(inputs)
    function = torch.compile(loss_of, fullgraph=True)
    for _ in range(2):
        function(inputs.leaves(), dy, backend=backend, **compiled).backward()
        loss_of(inputs.leaves(), dy, backend=backend, **eager).backward()
        assert_same_bits(dict(compiled), dict(eager))


@both_backends
def test_two_layers_in_one_graph(backend: str) -> None:
    """The output of one is the input of the other; their launches stay in order."""
    inputs = layer(65)
    assert inputs.num_experts == EXPERTS

    def twice(leaves: LayerInputs, x: Tensor) -> Tensor:
        y = replace(leaves, x=x).call(backend=backend)
        return replace(leaves, x=torch.tanh(y)).call(backend=backend)

    results = []
    for function in (twice, torch.compile(twice, fullgraph=True, backend="aot_eager")):
        leaves = inputs.leaves()
        y = function(leaves, leaves.x)
        y.backward(make_dy(y))
        results.append({"y": y.detach(), **leaves.grads()})
    assert_same_bits(results[1], results[0])
