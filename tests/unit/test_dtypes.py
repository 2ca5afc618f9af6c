"""Roundings of the whole layer, float16's range, and what a call leaves alone: its inputs and dropped weights."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tests.steps import (
    ALL_DTYPES,
    TOLERANCES,
    Results,
    assert_same_bits,
    check_step,
    expected_step,
    make_dy,
    name_of,
    run_step,
)
from torch import Tensor

from moe_megakernel.testing import (
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

LOW = [torch.bfloat16, torch.float16]


def rounded_step(inputs: LayerInputs, dy: Tensor) -> Results:
    """SwiGLU forward and backward with the roundings of the contract and everything else in float64.

    Rounded once: h, a, s * a, dh, the o and dx rows, y, dx. Not rounded here: gradients that are stored in float32.
    """
    dtype = inputs.x.dtype
    row_dtype = torch.float32 if dtype == torch.float16 else dtype
    wide, dy = inputs.to(torch.float64), dy.double()
    results = {"y": torch.zeros_like(wide.x), "x": torch.zeros_like(wide.x)}
    results |= {name: torch.zeros_like(getattr(wide, name)) for name in ("topk_weights", "w_gate_up", "w_down")}
    for t, ids in enumerate(inputs.topk_idx.tolist()):
        for k, e in enumerate(ids):
            x, s = wide.x[t], wide.topk_weights[t, k]
            h = (wide.w_gate_up[e] @ x).to(dtype).double().requires_grad_()
            act = torch.nn.functional.silu(h[: len(h) // 2]) * h[len(h) // 2 :]
            a = act.detach().to(dtype).double()
            da = dy[t] @ wide.w_down[e]
            (dh,) = torch.autograd.grad(act, h, s * da)
            dh = dh.to(dtype).double()
            results["y"][t] += s * (wide.w_down[e] @ a).to(row_dtype).double()
            results["x"][t] += (dh @ wide.w_gate_up[e]).to(row_dtype).double()
            results["topk_weights"][t, k] = da @ a
            results["w_gate_up"][e] += torch.outer(dh, x)
            results["w_down"][e] += torch.outer(dy[t], (s * a).to(dtype).double())
    return {n: r.to(dtype) if n in ("y", "x") else r for n, r in results.items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=name_of)
def test_roundings(dtype: torch.dtype, recompute: bool) -> None:
    """Every rounding of the contract and no other: a fraction of one rounding's error is left.

    What is left comes from the few elements whose float32 sum lies at the edge between two values.
    """
    inputs = make_inputs(random_routing(32, 4, 2), dtype=dtype)
    main: dict[str, Any] = {
        "main_grad_gate_up": torch.zeros(inputs.w_gate_up.shape),
        "main_grad_down": torch.zeros(inputs.w_down.shape),
    }
    dy = make_dy(inputs.x)
    results = run_step(inputs, dy=dy, recompute=recompute, **main)
    results |= {"w_gate_up": main["main_grad_gate_up"], "w_down": main["main_grad_down"]}
    one_rounding = torch.finfo(dtype).eps / 4  # root mean square of the relative error, about
    for name, expected in rounded_step(inputs, dy).items():
        assert_close(results[name], expected, one_rounding / 5, name)


def test_float16_outputs_beyond_its_range() -> None:
    """Rows beyond 65504, where float16 ends, come back right where a small weight brings them into range."""
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=torch.float16)
    scaled = replace(inputs, w_down=inputs.w_down * 2**15, topk_weights=inputs.topk_weights * 2**-15)
    assert inputs.bias_down is not None
    scaled = replace(scaled, bias_down=inputs.bias_down * 2**13)
    rows = replace(scaled.to(torch.float64), topk_weights=torch.ones(8, 2, dtype=torch.float64)).call()
    assert rows.abs().max() > 65504
    with poisoned_memory():
        y, again = scaled.call(), scaled.call()
    assert y.isfinite().all()
    assert_equal_bits(again, y)
    assert_close(y, scaled.to(torch.float64).call(), TOLERANCES[torch.float16][0])


def test_float16_gradients_beyond_its_range() -> None:
    """dx rows larger than the range that cancel in the sum over a token's routes."""
    inputs = make_inputs(torch.tensor([[0, 1]] * 8), num_experts=2, dtype=torch.float16)
    twin = replace(
        inputs,
        w_gate_up=inputs.w_gate_up[:1].expand(2, 64, 64) * 2**8,
        w_down=inputs.w_down[:1].expand(2, 64, 32) * 2**8,
        x=inputs.x / 2**8,
        topk_weights=torch.tensor([[1.0, -1.0]] * 8),
    )
    dy = make_dy(inputs.x) * 2
    results = run_step(twin, dy=dy)
    single = run_step(replace(twin.to(torch.float64), topk_idx=torch.tensor([[0, -1]] * 8)), dy=dy.double())
    assert single["x"] is not None
    assert single["x"].abs().max() > 65504
    assert results["x"] is not None
    assert not results["x"].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_weights_at_dropped_slots_have_no_effect(dtype: torch.dtype, value: float) -> None:
    inputs = make_inputs(random_routing(8, 4, 2, drop=0.4), bias=True, dtype=dtype)
    dropped = inputs.topk_idx < 0
    sick = replace(inputs, topk_weights=inputs.topk_weights.masked_fill(dropped, value))
    for recompute in (False, True):
        results = run_step(sick, recompute=recompute)
        assert_same_bits(results, run_step(inputs))
        assert results["topk_weights"] is not None
        assert not results["topk_weights"][dropped].any()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_inputs_are_left_alone_and_outputs_are_new(dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2, drop=0.2), bias=True, dtype=dtype)
    leaves = inputs.leaves()
    y = leaves.call()
    dy = make_dy(y)
    kept = dy.clone()
    named: dict[str, Any] = {f.name: getattr(leaves, f.name) for f in fields(leaves)[:7]}
    wanted = [t for t in named.values() if t.requires_grad]
    grads = torch.autograd.grad(y, wanted, dy)
    assert_equal_bits(dy, kept)
    for name, tensor in named.items():
        assert_equal_bits(tensor, getattr(inputs, name), name)
        assert tensor._version == 0, name
    storages = [t.untyped_storage().data_ptr() for t in (*named.values(), dy, y, *grads)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_row_of_one_expert_counts_once_per_slot(dtype: torch.dtype) -> None:
    """Duplicate ids inside a token are routes of their own: their outputs and gradients sum."""
    ids = torch.tensor([[1, 1, 2], [0, 0, 0], [3, -1, 3], [2, 1, 0]])
    check_step(make_inputs(ids, bias=True, dtype=dtype))


def test_scalar_and_shared_inputs() -> None:
    """One tensor as several experts' weights and as x of several calls; gradients add up."""
    inputs = make_inputs(random_routing(8, 4, 2))
    w = inputs.w_gate_up[:1].clone().requires_grad_()
    leaves = inputs.leaves()
    y = replace(leaves, w_gate_up=w.expand(4, 64, 64)).call()
    y.backward(make_dy(y))
    expected = expected_step(replace(inputs, w_gate_up=inputs.w_gate_up[:1].expand(4, 64, 64).contiguous()))
    assert expected["w_gate_up"] is not None
    assert_close(w.grad, expected["w_gate_up"].sum(0, keepdim=True), 1e-12)
