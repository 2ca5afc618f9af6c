"""Cases A01 to A04, A06 and A08 on the fused kernels: which experts get rows, how many, and what lies beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, check_layer, fill_workspace, on_device, saved
from tests.steps import assert_same_bits, run_step

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

pytestmark = GPU

BUSY = {"one empty": [0, 1, 3], "last empty": [0, 1, 2], "first empty": [1, 2, 3], "two adjacent empty": [0, 3]}
COUNTS = [1, 0, 7, 8, 63, 64, 65, 127, 128, 129, 256, 0]


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY.keys())
def test_a01_expert_without_tokens(busy: list[int]) -> None:
    ids = torch.tensor(busy)[random_routing(8, len(busy), 2)]
    results = check_layer(make_inputs(ids, bias=True))
    for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        gradient = results[name]
        assert gradient is not None
        for e in range(4):
            assert bool((gradient[e] == 0).all()) == (e not in busy), f"{name} of expert {e}"


def test_a01_many_experts_few_tokens() -> None:
    check_layer(make_inputs(random_routing(5, 256, 8), 24, 16, 256))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_a02_dropped_slots(index_dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1], [0, -1], [2, 3], [-1, 2], [1, 0], [-1, -1], [3, 1], [2, 0]], dtype=index_dtype)
    inputs = make_inputs(ids, bias=True)
    results = check_layer(inputs)
    y, dx, dweights = results["y"], results["x"], results["topk_weights"]
    assert y is not None
    assert dx is not None
    assert dweights is not None
    assert not y[5].any()
    assert not dx[5].any()
    assert bool(((dweights != 0) == (ids >= 0).cuda()).all())


@both_backends
def test_a02_what_stands_at_a_dropped_slot_has_no_effect(backend: str) -> None:
    inputs = on_device(make_inputs(random_routing(300, 6, 4, drop=0.4), 64, 64, 6))
    dropped = inputs.topk_idx < 0
    expected = run_step(replace(inputs, topk_weights=inputs.topk_weights.masked_fill(dropped, 0)), backend=backend)
    for value in (torch.nan, torch.inf, -3.0):
        given = replace(inputs, topk_weights=inputs.topk_weights.masked_fill(dropped, value))
        assert_same_bits(run_step(given, backend=backend), expected)


def test_a02_every_slot_dropped() -> None:
    for name, tensor in check_layer(make_inputs(torch.full((8, 2), -1), bias=True)).items():
        assert tensor is not None, name
        assert not tensor.any(), name


@pytest.mark.parametrize("ids", [[3], [3, 5], [5, 3]], ids=str)
def test_a03_every_token_to_one_expert(ids: list[int]) -> None:
    check_layer(make_inputs(torch.tensor(ids).repeat(512, 1), num_experts=8))


def assert_empty_step(inputs: LayerInputs, backend: str, compiled: bool) -> None:
    """T = 0: empty y and dx, zero weight gradients, still part of the graph."""
    call = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager") if compiled else LayerInputs.call
    leaves = inputs.leaves()
    y = call(leaves, backend=backend)
    assert y.requires_grad
    assert (y.shape, y.dtype) == (inputs.x.shape, inputs.x.dtype)
    y.sum().backward()
    for name, gradient in leaves.grads().items():
        assert_equal_bits(gradient, torch.zeros_like(getattr(inputs, name)), name)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@both_backends
def test_a04_no_tokens(backend: str, compiled: bool) -> None:
    full = on_device(make_inputs(random_routing(8, 4, 2)))
    with poisoned_memory():
        before = run_step(full, backend=backend)
        for bias in (False, True):
            none = make_inputs(torch.empty(0, 2, dtype=torch.int64), bias=bias)
            assert_empty_step(on_device(none), backend, compiled)
        assert_same_bits(run_step(full, backend=backend), before)


@pytest.mark.parametrize("tokens", [32, 64, 500])
def test_a06_rows_past_the_last_route(tokens: int) -> None:
    results = check_layer(make_inputs(random_routing(tokens, 4, 2, drop=0.25, seed=3), bias=True))
    for name, tensor in results.items():
        assert tensor is not None, name
        assert tensor.isfinite().all(), name


@both_backends
def test_a06_a_smaller_step_after_a_larger_one(backend: str) -> None:
    """One workspace serves steps of every size; what a larger one left in it reaches no smaller one."""
    sizes = (40, 700, 3, 129, 1)
    small = [on_device(make_inputs(random_routing(t, 6, 2, zipf=1.0, seed=t), 64, 64, 6)) for t in sizes]
    with poisoned_memory():
        expected = [inputs.call(backend=backend) for inputs in small]
        for inputs, y in zip(small, expected, strict=True):
            fill_workspace(small[1], backend)
            assert_equal_bits(inputs.call(backend=backend), y, f"T = {inputs.x.shape[0]}")


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1024, 33), (129, 1, 1), (4096, 1024, 8), (40_000, 128, 8), (70_001, 5, 3)]
)
def test_route_equals_the_cpu(tokens: int, experts: int, top_k: int, index_dtype: torch.dtype) -> None:
    """All results of `moe::route`, with strides, dropped routes and invalid ids."""
    generator = torch.Generator().manual_seed(tokens)
    ids = (torch.rand(tokens, top_k, generator=generator).square() * experts).to(index_dtype)
    ids[torch.rand(tokens, top_k, generator=generator) < 0.1] = -1
    bad = ids.clone()
    bad[tokens // 2, top_k - 1], bad[tokens - 1, 0] = experts, -7
    for given in (ids, bad, bad.t().contiguous().t()):
        expected = torch.ops.moe.route(given, experts)
        for got, want in zip(torch.ops.moe.route(given.cuda(), experts), expected, strict=True):
            assert_equal_bits(got, want)


def ragged_ids() -> torch.Tensor:
    ids = torch.arange(12).repeat_interleave(torch.tensor(COUNTS))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


def test_a08_ragged_counts() -> None:
    check_layer(make_inputs(ragged_ids()[:, None], 256, 128, 12))


def test_a08_one_token() -> None:
    check_layer(make_inputs(torch.tensor([[2, 1]])))


@both_backends
def test_a08_nan_in_one_experts_rows(backend: str) -> None:
    """It stays with its tokens; everything else keeps its bits."""
    ids = ragged_ids()
    inputs = on_device(make_inputs(ids[:, None], 256, 128, 12, bias=True))
    with poisoned_memory():
        clean = saved(inputs, backend)
        for expert in (0, 2, 6, 9, 10):
            sick = (ids == expert).cuda()
            y = saved(replace(inputs, x=inputs.x.masked_fill(sick[:, None], torch.nan)), backend).y
            assert y[sick].isnan().all(), f"NaN at expert {expert}"
            assert_equal_bits(y[~sick], clean.y[~sick], f"y, NaN at expert {expert}")


@both_backends
def test_a08_bits_do_not_depend_on_other_experts(backend: str) -> None:
    """An expert's rows alone give the bits that they give among others, at every place in a tile."""
    ids = ragged_ids()
    inputs = on_device(make_inputs(ids[:, None], 128, 72, 12))
    whole = inputs.call(backend=backend)
    for expert in (2, 7, 9, 10):
        mine = (ids == expert).cuda()
        alone = replace(inputs, topk_idx=torch.where(mine[:, None], inputs.topk_idx, -1))
        assert_equal_bits(alone.call(backend=backend)[mine], whole[mine], f"expert {expert}")
