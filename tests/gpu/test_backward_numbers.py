"""Case A15 and its kin on the fused kernels: gradients of routing weights, of repeated and dropped routes, and exact
zeros.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, check_layer, on_device, oracle_by_expert
from tests.steps import assert_near, expected_step, make_dy, run_step
from torch import Tensor

from moe_megakernel.testing import (
    BF16_GRADIENT,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

pytestmark = GPU

WEIGHT_ROWS = [[0.0, 0.0], [0.0, 1.0], [-0.5, 2.0], [1e-30, 1.0], [3.0, 4.0], [-1e-30, -7.0], [1e20, 1.0], [0.5, 0.5]]


def gradient(results: dict[str, Tensor | None], name: str) -> Tensor:
    found = results[name]
    assert found is not None, name
    return found


def expert_outputs(inputs: LayerInputs) -> Tensor:
    """expert_k(x[n]) for every route in float64, [T, K, H]."""
    exact = inputs.to(torch.float64)
    ones = torch.ones_like(exact.topk_weights[:, :1])
    columns = range(inputs.topk_idx.shape[1])
    parts = [replace(exact, topk_idx=exact.topk_idx[:, k : k + 1], topk_weights=ones) for k in columns]
    return torch.stack([oracle_by_expert(part) for part in parts], 1)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@both_backends
def test_a15_routing_weight_gradient(backend: str, bias: bool) -> None:
    """d weight[n, k] = <dy[n], expert_k(x[n])>, the same bits whatever the weights are."""
    inputs = on_device(make_inputs(random_routing(160, 6, 2), 136, 200, 6, bias=bias))
    awkward = replace(inputs, topk_weights=torch.tensor(WEIGHT_ROWS * 20, device="cuda"))
    with poisoned_memory():
        results = run_step(awkward, backend=backend)
    for name, tensor in results.items():
        assert tensor is not None, name
        assert tensor.isfinite().all(), name
    exact = torch.einsum("th,tkh->tk", make_dy(inputs.x).double(), expert_outputs(inputs))
    assert_close(results["topk_weights"], exact, BF16_GRADIENT)
    assert_equal_bits(results["topk_weights"], run_step(inputs, backend=backend)["topk_weights"])


@pytest.mark.parametrize("row", [[0.0, 0.0], [0.0, 1.0], [-0.5, 2.0], [1e-30, 1.0], [3.0, 4.0]], ids=str)
def test_a15_weight_gradients_are_scaled(row: list[float]) -> None:
    inputs = make_inputs(random_routing(70, 4, 2), 72, 64, bias=True)
    check_layer(replace(inputs, topk_weights=torch.tensor([row] * 70, dtype=torch.float64)))


@pytest.mark.parametrize("top_k", [2, 3, 9])
def test_an_expert_named_more_than_once(top_k: int) -> None:
    """Every route counts; those of one token to one expert have the same gradient, bit for bit."""
    results = check_layer(make_inputs(torch.arange(140)[:, None].expand(140, top_k) % 5, 72, 136, 5, bias=True))
    dweights = gradient(results, "topk_weights")
    assert_equal_bits(dweights, dweights[:, :1].expand(140, top_k).contiguous(), "topk_weights")


@pytest.mark.parametrize("value", [1.0, 0.0, torch.nan, torch.inf])
@both_backends
def test_a_dropped_route_has_an_exact_zero(backend: str, value: float) -> None:
    """Whatever its weight is, and whatever dy holds at tokens without a route."""
    inputs = on_device(make_inputs(random_routing(300, 6, 3, drop=0.5), 64, 72, 6))
    dropped = inputs.topk_idx < 0
    gone = dropped.all(1)
    assert bool(gone.any())
    given = replace(inputs, topk_weights=inputs.topk_weights.masked_fill(dropped, value))
    dy = make_dy(inputs.x).masked_fill(gone[:, None], torch.nan)
    with poisoned_memory():
        results = run_step(given, dy=dy, backend=backend)
    dweights = gradient(results, "topk_weights")
    assert_equal_bits(dweights[dropped], torch.zeros_like(dweights[dropped]))
    dx = gradient(results, "x")
    assert_equal_bits(dx[gone], torch.zeros_like(dx[gone]))
    for name, tensor in results.items():
        assert tensor is not None, name
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("busy", [[0, 1, 3], [1, 2], [3], [0]], ids=str)
@both_backends
def test_a01_empty_experts_have_exact_zeros(backend: str, busy: list[int]) -> None:
    """All bits zero, no negative zeros, also where no row reaches the expert's tiles of a large weight."""
    ids = torch.tensor(busy)[random_routing(200, len(busy), 1)]
    inputs = on_device(make_inputs(ids, 392, 264, bias=True))
    with poisoned_memory():
        results = run_step(inputs, backend=backend)
    for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        found = gradient(results, name)
        for e in set(range(4)) - set(busy):
            assert_equal_bits(found[e], torch.zeros_like(found[e]), f"{name} of expert {e}")
    assert_near(results, expected_step(inputs, oracle=oracle_by_expert), torch.bfloat16)


def test_a01_every_expert_empty_but_one_row() -> None:
    ids = torch.full((300, 2), -1)
    ids[299, 1] = 2
    check_layer(make_inputs(ids, 136, 72, bias=True))


@both_backends
def test_a08_nan_in_one_experts_gradients(backend: str) -> None:
    """NaN in dy stays with its tokens and the experts that they went to; everything else keeps its bits."""
    ids = (torch.arange(900) * 7 % 30).clamp(max=5)[:, None]
    inputs = on_device(make_inputs(ids, 136, 72, 6, bias=True))
    dy = make_dy(inputs.x)
    clean = run_step(inputs, dy=dy, backend=backend)
    for expert in (0, 5):
        sick = (ids[:, 0] == expert).cuda()
        results = run_step(inputs, dy=dy.masked_fill(sick[:, None], torch.nan), backend=backend)
        others = [e for e in range(6) if e != expert]
        for name in ("x", "topk_weights"):
            found = gradient(results, name)
            assert found[sick].isnan().all(), name
            assert_equal_bits(found[~sick], gradient(clean, name)[~sick], name)
        for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
            found = gradient(results, name)
            assert found[expert].isnan().all(), name
            assert_equal_bits(found[others], gradient(clean, name)[others], name)


@both_backends
def test_dx_is_one_rounding_of_the_sum_over_routes(backend: str) -> None:
    """The float32 sum over k, ascending, of the rounded rows, bit for bit; the weights' own scale is in the rows."""
    top_k = 5
    inputs = on_device(make_inputs(torch.arange(top_k).repeat(70, 1), 136, 64, num_experts=top_k))
    dy = make_dy(inputs.x)
    total = torch.zeros(70, 136, device="cuda")
    for k in range(top_k):
        alone = replace(
            inputs, topk_idx=inputs.topk_idx[:, k : k + 1], topk_weights=inputs.topk_weights[:, k : k + 1].contiguous()
        )
        total += gradient(run_step(alone, dy=dy, backend=backend), "x").float()
    assert_equal_bits(gradient(run_step(inputs, dy=dy, backend=backend), "x"), total.to(torch.bfloat16), "x")
