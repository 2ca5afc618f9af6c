"""Case A17: the layer under torch.compile, forward and backward, with changing numbers of tokens.

Inductor compiles take seconds, so it is used where code is generated around the op; the rest runs on `aot_eager`,
which traces, functionalises and partitions alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.steps import ACTIVATION_CASES, Results, assert_near, assert_same_bits, name_of, run_step
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from moe_megakernel.testing import LayerInputs, assert_close, make_inputs, poisoned_memory, random_routing

E, K, H, I = 4, 2, 64, 32  # noqa: E741


class Block(torch.nn.Module):
    """Router, softmax, top-k and the layer, with something for the compiler to fuse on both sides."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        values = make_inputs(random_routing(8, E, K), H, I, E, dtype=dtype)
        self.router = torch.nn.Linear(H, E, dtype=dtype)
        self.w_gate_up = torch.nn.Parameter(values.w_gate_up)
        self.w_down = torch.nn.Parameter(values.w_down)
        self.options = options

    def forward(self, x: Tensor, skew: Tensor) -> Tensor:
        scores = torch.softmax(self.router(x).float() + skew, dim=-1)
        weights, ids = scores.topk(K, dim=-1)
        residual = x * 0.5
        y = torch.ops.moe.dispatch_gemm_combine(
            residual, ids, weights, self.w_gate_up, self.w_down, num_experts=E, **self.options
        )
        return torch.nn.functional.silu(y) + x

    def step(self, call: Callable[..., Tensor], tokens: int, favourite: int) -> Results:
        """One training step on `tokens` tokens that lean towards one expert."""
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, H, generator=generator).to(self.w_down.dtype).requires_grad_()
        skew = torch.zeros(E)
        skew[favourite] = 3.0
        self.zero_grad()
        y = call(x, skew)
        y.float().square().sum().backward()
        grads = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        assert grads.keys() == dict(self.named_parameters()).keys()
        return {"y": y.detach(), "x": x.grad, **grads}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def check_against_eager(block: Block, compiled: Callable[..., Tensor], sizes: list[int], tolerance: float) -> None:
    for i, tokens in enumerate(sizes):
        with poisoned_memory():
            actual, expected = block.step(compiled, tokens, i % E), block.step(block, tokens, i % E)
        assert actual.keys() == expected.keys()
        for name, tensor in actual.items():
            assert_close(tensor, expected[name], tolerance, f"{name} with {tokens} tokens")


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("inductor", torch.float32, 1e-5), ("aot_eager", torch.float32, 0), ("aot_eager", torch.bfloat16, 0)],
    ids=name_of,
)
def test_a17_dynamic_tokens(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """One graph for all sizes, whatever the skew; eager numbers, values and gradients."""
    counter = CompileCounterWithBackend(backend)
    block = Block(dtype)
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    check_against_eager(block, compiled, [8, 16, 33], tolerance)
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["saved", "recompute"])
def test_a17_one_recompile_over_twenty_sizes(options: dict[str, Any]) -> None:
    """The first size is compiled for itself, the second for any size of 2 or more; 0 and 1 may add one each."""
    counter = CompileCounterWithBackend("aot_eager")
    block = Block(**options)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    check_against_eager(block, compiled, [8, 33, 16, 2, 3, 5, 64, 65, 127, 128, *range(20, 30)], 0)
    assert counter.frame_count <= 2
    check_against_eager(block, compiled, [1, 0, 1, 0, 7], 0)
    assert counter.frame_count <= 4


def test_a17_the_op_alone_keeps_its_bits() -> None:
    """Through inductor the op's results are those of eager, also with dropped routes, biases and every dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        compiled = torch.compile(LayerInputs.call, fullgraph=True, dynamic=True)
        for tokens in (8, 13):
            inputs = make_inputs(random_routing(tokens, E, K, drop=0.3), bias=True, dtype=dtype)
            with poisoned_memory():
                assert_same_bits(run_step(inputs, compiled), run_step(inputs))


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_a17_every_activation(case: dict[str, Any]) -> None:
    inputs = make_inputs(random_routing(8, E, K, drop=0.2), bias=True, dtype=torch.float32, **case)
    compiled = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager")
    for recompute in (False, True):
        assert_same_bits(run_step(inputs, compiled, recompute=recompute), run_step(inputs))


def test_a17_equal_calls_and_unused_calls() -> None:
    """A compiler may merge or drop calls of one rank; the gradients are still sums over all uses."""
    inputs = make_inputs(random_routing(8, E, K), dtype=torch.float64)

    def twice(leaves: LayerInputs) -> Tensor:
        leaves.call(activation="relu2", limit=None) if leaves.activation == "relu2" else leaves.call()
        return leaves.call() + 2 * leaves.call()

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert_near(run_step(inputs, compiled), run_step(inputs, twice), torch.float64)
