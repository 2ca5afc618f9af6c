"""Cases A01 to A04: which experts get tokens, and how many. Every one in poisoned memory, all gradients compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.steps import assert_near, assert_same_bits, check_step, expected_step, make_dy, name_of, run_step

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
BUSY = {"one empty": [0, 1, 3], "last empty": [0, 1, 2], "first empty": [1, 2, 3], "two adjacent empty": [0, 3]}


def routing_among(experts: list[int], tokens: int = 8, top_k: int = 2) -> torch.Tensor:
    """[T, K] without repeats inside a token, over `experts` only."""
    return torch.tensor(experts)[random_routing(tokens, len(experts), top_k)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY.keys())
def test_a01_expert_without_tokens(busy: list[int], dtype: torch.dtype, recompute: bool) -> None:
    inputs = make_inputs(routing_among(busy), bias=True, dtype=dtype)
    results = check_step(inputs, recompute=recompute)
    for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        gradient = results[name]
        assert gradient is not None
        for e in range(4):
            assert bool((gradient[e] == 0).all()) == (e not in busy), f"{name} of expert {e}"


def test_a01_many_experts_few_tokens() -> None:
    check_step(make_inputs(random_routing(5, 256, 8), 24, 16, 256, dtype=torch.float32))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a02_dropped_slots(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    ids = [[0, 1], [0, -1], [2, 3], [-1, 2], [1, 0], [-1, -1], [3, 1], [2, 0]]
    inputs = make_inputs(torch.tensor(ids, dtype=index_dtype), bias=True, dtype=dtype)
    results = check_step(inputs)
    y, dx, dweights = results["y"], results["x"], results["topk_weights"]
    assert y is not None
    assert dx is not None
    assert dweights is not None
    assert not y[5].any()
    assert not dx[5].any()
    assert not dweights[inputs.topk_idx < 0].any()
    assert dweights[inputs.topk_idx >= 0].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a02_other_rows_do_not_notice(dtype: torch.dtype) -> None:
    """Rows of other tokens, and all weight gradients, are those of the batch without the -1 rows, bit for bit."""
    ids = torch.tensor([[0, 1], [-1, -1], [2, 3], [-1, -1], [1, 0], [-1, -1], [3, 1], [2, 0]])
    kept = [0, 2, 4, 6, 7]
    whole = make_inputs(ids, bias=True, dtype=dtype)
    part = replace(whole, x=whole.x[kept], topk_idx=ids[kept], topk_weights=whole.topk_weights[kept])
    dy = make_dy(whole.x)
    with poisoned_memory():
        results, without = run_step(whole, dy=dy), run_step(part, dy=dy[kept])
    for name in ("y", "x", "topk_weights"):
        tensor = results[name]
        assert tensor is not None
        results[name] = tensor[kept]
    assert_same_bits(results, without)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a02_every_slot_dropped(dtype: torch.dtype) -> None:
    results = check_step(make_inputs(torch.full((8, 2), -1), bias=True, dtype=dtype))
    for name, tensor in results.items():
        assert tensor is not None, name
        assert not tensor.any(), name


@pytest.mark.parametrize("ids", [[3], [3, 5], [5, 3]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a03_every_token_to_one_expert(ids: list[int], dtype: torch.dtype) -> None:
    check_step(make_inputs(torch.tensor(ids).repeat(512, 1), num_experts=8, dtype=dtype))


def assert_empty_step(inputs: LayerInputs, compiled: bool) -> None:
    """T = 0: empty y and dx, zero weight gradients, still part of the graph."""
    call = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager") if compiled else LayerInputs.call
    leaves = inputs.leaves()
    y = call(leaves)
    assert y.requires_grad
    assert y.shape == inputs.x.shape
    assert y.dtype == inputs.x.dtype
    y.sum().backward()
    for name, gradient in leaves.grads().items():
        assert_equal_bits(gradient, torch.zeros_like(getattr(inputs, name)), name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a04_no_tokens(dtype: torch.dtype, compiled: bool) -> None:
    with poisoned_memory():
        assert_empty_step(make_inputs(torch.empty(0, 2, dtype=torch.int64), bias=True, dtype=dtype), compiled)
        empty = torch.empty(0, 1, dtype=torch.int32)
        assert_empty_step(make_inputs(empty, 256, 224, activation="relu2", dtype=dtype), compiled)


def test_a04_no_tokens_between_other_steps() -> None:
    """A step without tokens leaves the steps around it alone."""
    inputs = make_inputs(random_routing(8, 4, 2))
    with poisoned_memory():
        before = run_step(inputs)
        run_step(replace(inputs, x=inputs.x[:0], topk_idx=inputs.topk_idx[:0], topk_weights=inputs.topk_weights[:0]))
        assert_same_bits(run_step(inputs), before)
    assert_near(before, expected_step(inputs), torch.float64)
