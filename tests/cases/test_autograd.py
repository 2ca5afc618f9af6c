"""Cases A14 and A15: which gradients are asked for, what backward then does and keeps, and routing weights at will."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.steps import Results, assert_same_bits, check_step, make_dy, name_of, run_step
from torch import Tensor

from moe_megakernel.reference import experts
from moe_megakernel.testing import (
    DIFFERENTIABLE,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    oracle,
    poisoned_memory,
    random_routing,
)

FOUR = ("x", "topk_weights", "w_gate_up", "w_down")
#: With biases: all frozen, each one alone, each one missing, all.
SOME_OF_SIX = [
    *(tuple(n == m for m in DIFFERENTIABLE) for n in DIFFERENTIABLE),
    *(tuple(n != m for m in DIFFERENTIABLE) for n in DIFFERENTIABLE),
    (True,) * 6,
]
STAGES = ("down_wgrad", "gate_up_wgrad", "down_dgrad", "gate_up_dgrad", "route_weight_grad", "activate_backward")


@contextmanager
def counted_stages() -> Iterator[dict[str, int]]:
    """Counts the calls of the backward stages inside."""
    counts = dict.fromkeys(STAGES, 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in STAGES:
            patch.setattr(experts, name, counting(counts, name, getattr(experts, name)))
        yield counts


def counting(counts: dict[str, int], name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapper(*args: Any) -> Tensor:
        counts[name] += 1
        return function(*args)

    return wrapper


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collects what autograd keeps for backward inside."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def partial_step(inputs: LayerInputs, wanted: dict[str, bool], **options: bool) -> tuple[Results, dict[str, int]]:
    with poisoned_memory(), counted_stages() as counts:
        leaves = inputs.leaves(**wanted)
        y = leaves.call(**options)
        assert y.requires_grad == any(wanted.values())
        if y.requires_grad:
            y.backward(make_dy(y))
        return {"y": y.detach(), **leaves.grads()}, counts


def check_partial(inputs: LayerInputs, wanted: dict[str, bool], whole: Results, **options: bool) -> None:
    """Asked-for gradients have the bits of the full step, the others are None, and no other stage runs."""
    for _ in range(2):
        results, counts = partial_step(inputs, wanted, **options)
        assert_same_bits(results, {n: t if n == "y" or wanted[n] else None for n, t in whole.items()})
    ran = {name for name, count in counts.items() if count}
    dh = wanted["x"] or wanted["w_gate_up"] or wanted.get("bias_gate_up", False)
    expected = {
        "down_wgrad": wanted["w_down"],
        "gate_up_wgrad": wanted["w_gate_up"],
        "down_dgrad": dh or wanted["topk_weights"],
        "gate_up_dgrad": wanted["x"],
        "route_weight_grad": wanted["topk_weights"],
        "activate_backward": dh,
    }
    assert ran == {name for name, runs in expected.items() if runs}


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=name_of)
def test_a14_all_combinations(dtype: torch.dtype, recompute: bool) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), dtype=dtype)
    whole = check_step(inputs, recompute=recompute)
    for mask in product((False, True), repeat=4):
        check_partial(inputs, dict(zip(FOUR, mask, strict=True)), whole, recompute=recompute)


@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize("mask", SOME_OF_SIX, ids=lambda m: "".join("fg"[on] for on in m))
def test_a14_with_biases(mask: tuple[bool, ...], activation: str) -> None:
    inputs = make_inputs(random_routing(8, 4, 2, drop=0.2), bias=True, dtype=torch.float32, activation=activation)
    wanted = dict(zip(DIFFERENTIABLE, mask, strict=True))
    for recompute in (False, True):
        check_partial(inputs, wanted, check_step(inputs, recompute=recompute), recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recompute"])
def test_a14_saved_tensors(recompute: bool) -> None:
    """x is kept for dW_gate_up, h for everything, weights for the gradients that read them; the activation never.

    With `recompute` x, w_gate_up and its bias stand in for h.
    """
    inputs = make_inputs(random_routing(9, 4, 2), 48, 20, bias=True, dtype=torch.float32)
    shapes = {
        "x": (9, 48),
        "topk_weights": (9, 2),
        "w_gate_up": (4, 40, 48),
        "w_down": (4, 48, 20),
        "bias_gate_up": (4, 40),
        "bias_down": (4, 48),
        "h": (18, 40),
        "a": (18, 20),
    }
    for mask in product((False, True), repeat=6):
        wanted = dict(zip(DIFFERENTIABLE, mask, strict=True))
        leaves = inputs.leaves(**wanted)
        with saved_tensors() as saved:
            leaves.call(recompute=recompute)
        kept = {name for name, shape in shapes.items() if any(tuple(t.shape) == shape for t in saved)}
        if not any(mask):
            assert not saved
            continue
        assert any(t.data_ptr() == leaves.topk_idx.data_ptr() for t in saved), "the caller's own ids, not a copy"
        dh = wanted["x"] or wanted["w_gate_up"] or wanted["bias_gate_up"]
        expected = {
            "x": wanted["w_gate_up"] or recompute,
            "topk_weights": True,
            "w_gate_up": wanted["x"] or recompute,
            "w_down": dh or wanted["topk_weights"],
            "bias_gate_up": recompute,
            "bias_down": wanted["topk_weights"],
            "h": not recompute,
            "a": False,
        }
        assert kept == {name for name, keeps in expected.items() if keeps}, wanted


def test_a14_nothing_kept_without_gradients() -> None:
    leaves = make_inputs(random_routing(8, 4, 2)).leaves()
    for context in (torch.no_grad(), torch.inference_mode()):
        with saved_tensors() as saved, context:
            assert not leaves.call().requires_grad
        assert not saved


WEIGHT_ROWS = [[0.0, 0.0], [0.0, 1.0], [-0.5, 2.0], [1e-30, 1.0], [3.0, 4.0], [-1e-30, -7.0], [1e20, 1.0], [0.5, 0.5]]


def expert_outputs(inputs: LayerInputs) -> Tensor:
    """expert_k(x[n]) for every route, [T, K, H]."""
    rows = []
    for k in range(inputs.topk_idx.shape[1]):
        ids = inputs.topk_idx[:, k : k + 1]
        rows.append(oracle(replace(inputs, topk_idx=ids, topk_weights=torch.ones(ids.shape, dtype=torch.float64))))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_a15_routing_weight_gradient(dtype: torch.dtype, bias: bool) -> None:
    """d weight[n, k] = <dy[n], expert_k(x[n])>, the same bits whatever the weights are."""
    inputs = make_inputs(random_routing(8, 4, 2), bias=bias, dtype=dtype)
    awkward = replace(inputs, topk_weights=torch.tensor(WEIGHT_ROWS, dtype=inputs.topk_weights.dtype))
    with poisoned_memory():
        results = run_step(awkward)
    for name, tensor in results.items():
        assert tensor is not None
        assert tensor.isfinite().all(), name
    dy = make_dy(inputs.x).double()
    exact = torch.einsum("th,tkh->tk", dy, expert_outputs(inputs.to(torch.float64)))
    assert_close(results["topk_weights"], exact, {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2))
    assert_equal_bits(results["topk_weights"], run_step(inputs)["topk_weights"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("rows", [[0, 0], [0, 1], [-0.5, 2], [1e-30, 1], [3, 4]], ids=str)
def test_a15_weight_gradients_are_scaled(rows: list[float], dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    weights = torch.tensor([rows] * 8, dtype=inputs.topk_weights.dtype)
    check_step(replace(inputs, topk_weights=weights))


def test_a15_gradcheck() -> None:
    inputs = make_inputs(random_routing(8, 4, 2), 5, 3)
    weights = torch.tensor(WEIGHT_ROWS, dtype=torch.float64)
    weights[weights.abs() > 100] = 2  # a finite difference needs a scale
    leaves = replace(inputs, topk_weights=weights).leaves()

    def call(*tensors: Tensor) -> Tensor:
        named: dict[str, Any] = dict(zip(FOUR, tensors, strict=True))
        return replace(leaves, **named).call()

    assert torch.autograd.gradcheck(call, [getattr(leaves, n) for n in FOUR])
