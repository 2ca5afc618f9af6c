"""The layer compiled under autocast, without gradients, into a main gradient, and with changing options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tests.steps import assert_same_bits, name_of, run_step
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moe_megakernel.testing import (
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

E, K = 4, 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Projected(torch.nn.Module):
    """Linear, layer, Linear; the routing is given."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, leaves: LayerInputs) -> Tensor:
        weights = (leaves.w_gate_up, leaves.w_down)
        x = self.before(leaves.x)
        y = torch.ops.moe.dispatch_gemm_combine(x, leaves.topk_idx, leaves.topk_weights, *weights, num_experts=E)
        return self.after(y).float()


@pytest.mark.parametrize("inside", [False, True], ids=["around the compiled call", "inside it"])
def test_autocast(inside: bool) -> None:
    """Through inductor, one graph for several sizes; gradients in the parameters' dtype."""
    module = Projected()
    counter = CompileCounterWithBackend("inductor" if inside else "aot_eager")

    def autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(leaves: LayerInputs) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(leaves)

        return wrapper

    options: dict[str, Any] = {"fullgraph": True, "dynamic": True, "backend": counter}
    eager = autocast(module)
    compiled = torch.compile(eager, **options) if inside else autocast(torch.compile(module, **options))
    for tokens in (8, 16, 33):
        inputs = make_inputs(random_routing(tokens, E, K), dtype=torch.float32, seed=tokens)
        with poisoned_memory():
            actual, expected = run_step(inputs, compiled), run_step(inputs, eager)
        for name, tensor in actual.items():
            assert tensor is not None
            assert tensor.dtype == torch.float32
            # Inductor may keep float32 where eager rounds between two operations.
            assert_close(tensor, expected[name], 1e-2 if inside else 0, f"{name} with {tokens} tokens")
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference(context: Callable[[], AbstractContextManager[None]], backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(LayerInputs.call, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (8, 16, 33):
        leaves = make_inputs(random_routing(tokens, E, K, drop=0.2), bias=True, dtype=torch.bfloat16).leaves()
        with context(), poisoned_memory():
            y, expected = compiled(leaves), leaves.call()
        assert not y.requires_grad
        assert_equal_bits(y, expected)
    assert counter.frame_count == 1


def test_training_and_inference_in_turn() -> None:
    """Switching grad mode off and on again takes the right graph each time."""
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(random_routing(8, E, K), dtype=torch.float32)
    expected = run_step(inputs)
    for _ in range(2):
        assert_same_bits(run_step(inputs, compiled), expected)
        with torch.no_grad():
            assert_equal_bits(compiled(inputs.leaves()), expected["y"])
        with torch.inference_mode():
            assert_equal_bits(compiled(inputs.leaves()), expected["y"])


def test_main_grad_through_inductor() -> None:
    """Both main gradients, two sizes, one graph: what eager adds, bit for bit."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(LayerInputs.call, fullgraph=True, dynamic=True, backend=counter)
    first = make_inputs(random_routing(8, E, K), dtype=torch.bfloat16)
    sums: list[dict[str, Any]] = [
        {"main_grad_gate_up": torch.zeros(first.w_gate_up.shape), "main_grad_down": torch.zeros(first.w_down.shape)}
        for _ in range(2)
    ]
    for tokens in (8, 13, 8):
        inputs = make_inputs(random_routing(tokens, E, K, drop=0.2), dtype=torch.bfloat16, seed=tokens)
        with poisoned_memory():
            assert_same_bits(run_step(inputs, compiled, **sums[0]), run_step(inputs, **sums[1]))
    for name, tensor in sums[0].items():
        assert_equal_bits(tensor, sums[1][name], name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("frozen", ["x", "topk_weights", "w_gate_up", "w_down"])
def test_frozen_inputs(frozen: str) -> None:
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(random_routing(8, E, K), dtype=torch.float32)
    wanted = {frozen: False}
    assert_same_bits(run_step(inputs, compiled, requires_grad=wanted), run_step(inputs, requires_grad=wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=name_of)
def test_strided_inputs(dtype: torch.dtype) -> None:
    """Views made inside the compiled region."""

    def call(leaves: LayerInputs) -> Tensor:
        sliced = torch.cat([leaves.x, leaves.x], dim=1)[:, ::2]
        weights = leaves.topk_weights[:1].expand(8, K)
        parameters = (leaves.w_gate_up.mT.contiguous().mT, leaves.w_down.flip(2))
        return torch.ops.moe.dispatch_gemm_combine(sliced, leaves.topk_idx.t().t(), weights, *parameters, num_experts=E)

    inputs = make_inputs(random_routing(8, E, K), dtype=dtype)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(run_step(inputs, compiled), run_step(inputs, call))


def test_argument_errors_reach_the_caller() -> None:
    """A wrong shape is an error of the compile that names the argument, too."""
    inputs = make_inputs(random_routing(8, E, K), dtype=torch.float32)
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="activation: expected one of"):
        compiled(inputs, activation="elu")
    with pytest.raises(Exception, match="alpha: expected None with activation"):
        compiled(inputs, alpha=1.0)
    assert_equal_bits(compiled(inputs), inputs.call())
