"""Activations: the table of names and parameters, values against plain formulas, derivatives against autograd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tests.steps import ACTIVATION_CASES, name_of
from torch import Tensor

from moe_megakernel.activations import ACTIVATIONS, Activation, resolve_activation
from moe_megakernel.reference.activation import activate, activate_backward
from moe_megakernel.testing import assert_close, assert_equal_bits


def by_hand(h: float, up: float, act: Activation) -> float:
    """One value of the activation, from the published formulas, in Python floats."""
    if act.name == "relu2":
        return max(h, 0.0) ** 2
    gate = min(h, act.limit)
    up = max(-act.limit, min(up, act.limit))
    if act.name == "geglu_erf":
        return 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))) * up
    if act.name == "geglu_tanh":
        return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    swish = gate / (1 + math.exp(-act.alpha * gate))
    return swish * (up + 1) if act.name == "swiglu_oai" else swish * up


def draw_h(act: Activation, rows: int = 6, width: int = 5) -> Tensor:
    """[rows, 2 * width] or [rows, width]; with a limit, also values at it and at both of its neighbours."""
    generator = torch.Generator().manual_seed(3)
    h = 2 * torch.randn(rows, act.width_factor * width, generator=generator, dtype=torch.float64)
    if not math.isinf(act.limit):
        near = [act.limit, math.nextafter(act.limit, 0), math.nextafter(act.limit, math.inf)]
        edges = torch.tensor(near + [-v for v in near], dtype=torch.float64)
        h[:, 0] = edges  # a gate
        h[:, width] = edges.flip(0)  # an up
        h[:, width - 1] = edges
        h[:, 2 * width - 1] = edges
    else:
        h[0, 0] = h[1, -1] = 0.0
    return h


def resolve(case: dict[str, Any]) -> Activation:
    return resolve_activation(case["activation"], case.get("alpha"), case.get("limit"))


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_values(case: dict[str, Any]) -> None:
    act = resolve(case)
    h = draw_h(act)
    gate, up = h.chunk(2, dim=1) if act.gated else (h, h)
    values = [by_hand(*pair, act) for pair in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)]
    expected = torch.tensor(values, dtype=torch.float64).view(gate.shape)
    assert_close(activate(h, act), expected, 1e-14)
    assert_close(activate(h.float(), act), expected, 1e-6)


def clamped(h: torch.Tensor, act: Activation) -> torch.Tensor:
    """h within the limit, with a gradient of 1 at the limit itself; `torch.clamp` gives 0 there since torch 2.14."""
    if math.isinf(act.limit):
        return h
    gate, up = h.chunk(2, dim=1)
    gate = torch.where(gate > act.limit, act.limit, gate)
    up = torch.where(up > act.limit, act.limit, torch.where(up < -act.limit, -act.limit, up))
    return torch.cat((gate, up), dim=1)


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_derivative_is_autograds(case: dict[str, Any]) -> None:
    """Also at the limit, where the value is not clamped yet and the gradient passes, and one step beyond it."""
    act = resolve(case)
    h = draw_h(act).requires_grad_()
    a = activate(clamped(h, act), dataclasses.replace(act, limit=math.inf))
    grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (expected,) = torch.autograd.grad(a, h, grad)
    assert_close(activate_backward(grad, h.detach(), act), expected, 1e-14)
    if not math.isinf(act.limit):
        width = h.shape[1] // 2
        passes = expected[:, 0] != 0
        assert passes.tolist() == [True, True, False, True, True, True]  # the gate is clamped from above only
        passes = expected[:, width] != 0
        assert passes.tolist() == [False, True, True, False, True, True]  # the up on both sides


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_derivative_by_differences(case: dict[str, Any]) -> None:
    act = resolve(case)
    h = torch.randn(3, 4 * act.width_factor, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    h = torch.where((h.abs() - act.limit).abs() < 1e-3, 0.1, h)
    step = 1e-6
    grad = torch.ones(3, 4, dtype=torch.float64)
    result = activate_backward(grad, h, act)
    for column in range(h.shape[1]):
        shift = torch.zeros_like(h)
        shift[:, column] = step
        slope = (activate(h + shift, act) - activate(h - shift, act)).sum(1) / (2 * step)
        assert_close(result[:, column], slope, 1e-6)


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_bits_do_not_depend_on_where_rows_lie(case: dict[str, Any]) -> None:
    """An expert's rows at any place of a larger buffer, at any alignment, give the bits of a buffer of their own."""
    act = resolve(case)
    generator = torch.Generator().manual_seed(6)
    h = torch.randn(7, act.width_factor * 19, generator=generator)
    grad = torch.randn(7, 19, generator=generator)
    a, dh = activate(h, act), activate_backward(grad, h, act)
    for offset in range(18):
        buffer = torch.full((25, h.shape[1]), torch.nan)
        buffer[offset : offset + 7] = h
        placed = buffer[offset : offset + 7]
        assert_equal_bits(activate(placed, act), a)
        assert_equal_bits(activate_backward(grad, placed, act), dh)


@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_extreme_values_stay_finite(case: dict[str, Any]) -> None:
    act = resolve(case)
    values = torch.tensor([[-1e4, -100.0, 100.0, 1e4]])
    h = torch.cat([values, torch.ones_like(values)], dim=1) if act.gated else values
    assert activate(h, act).isfinite().all()
    assert activate_backward(torch.ones_like(values), h, act).isfinite().all()


def test_table() -> None:
    assert set(ACTIVATIONS) == {"swiglu", "swiglu_oai", "geglu_tanh", "geglu_erf", "geglu", "relu2"}
    assert resolve_activation("swiglu") == Activation("swiglu", True, 1.0, math.inf)
    assert resolve_activation("swiglu", limit=10) == Activation("swiglu", True, 1.0, 10.0)
    assert resolve_activation("swiglu_oai") == Activation("swiglu_oai", True, 1.702, 7.0)
    assert resolve_activation("swiglu_oai", 1.5, math.inf) == Activation("swiglu_oai", True, 1.5, math.inf)
    assert (
        resolve_activation("geglu") == resolve_activation("geglu_erf") == Activation("geglu_erf", True, 1.0, math.inf)
    )
    assert resolve_activation("relu2") == Activation("relu2", False, 1.0, math.inf)
    assert [resolve_activation(name).width_factor for name in ("swiglu", "relu2")] == [2, 1]
