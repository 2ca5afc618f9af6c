"""Rows of experts as a layer of one route a token: the order that the kernels find, and the bits of `experts`.

The launches are noted, or computed by the reference (`stand_in`).
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hopper.stand_in import Calls, launch_by_reference
from torch import Tensor

from moe_megakernel.activations import Activation
from moe_megakernel.hopper.rows import rows_backward, rows_forward, rows_of_tokens
from moe_megakernel.reference import route as reference_route
from moe_megakernel.reference.experts import Needs, Weights, experts_backward, experts_forward
from moe_megakernel.schemas import unpack_needs
from moe_megakernel.testing import assert_equal_bits

HIDDEN, WIDTH = 16, 8
SWIGLU = Activation("swiglu", True, 1.0, math.inf)
ALL = Needs(*[True] * 6)
CPU = torch.device("cpu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return launch_by_reference(monkeypatch)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def make_weights(experts: int, bias: bool = True) -> Weights:
    biases = (bf16(experts, 2 * WIDTH), bf16(experts, HIDDEN)) if bias else (None, None)
    return Weights(bf16(experts, 2 * WIDTH, HIDDEN), bf16(experts, HIDDEN, WIDTH), *biases)


def by_token(rows: Tensor) -> Tensor:
    """Rows in expert order, laid out as the kernels' tokens hold them."""
    return rows[rows_of_tokens(rows.shape[0], CPU).long()]


def by_row(tokens: Tensor) -> Tensor:
    """The inverse of `by_token`."""
    return torch.empty_like(tokens).index_copy_(0, rows_of_tokens(tokens.shape[0], CPU).long(), tokens)


sizes_of_experts = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=12)


@settings(deadline=None)
@given(sizes=sizes_of_experts)
def test_the_sort_brings_every_expert_its_rows_in_order(sizes: list[int]) -> None:
    """By the sort on CPU and by its twin: position i of the sorted routes is row i."""
    offsets, num_rows = offsets_of(sizes), sum(sizes)
    x = by_token(torch.arange(num_rows).bfloat16()[:, None].expand(num_rows, HIDDEN))
    with pytest.MonkeyPatch.context() as patch:
        calls = launch_by_reference(patch)
        rows_forward(x, offsets, make_weights(len(sizes)), SWIGLU, None, "mega")
    if num_rows == 0:
        assert not calls
        return
    (call,) = calls
    assert call["topk_idx"].shape == call["topk_weights"].shape == (num_rows, 1)
    assert bool((call["topk_weights"] == 1).all())
    for route in (torch.ops.moe.route, reference_route.route):
        order, counts, bad = route(call["topk_idx"], len(sizes))
        assert int(bad) == -1
        assert counts.sum(1).tolist() == sizes
        assert rows_of_tokens(num_rows, CPU)[order.long()].tolist() == list(range(num_rows))


#: Experts without rows at both ends and in between; more rows of an expert than classes.
SIZES = [0, 3, 0, 70, 1, 131, 0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("keeps_h", [False, True])
def test_forward_has_the_bits_of_the_reference(launches: Calls, keeps_h: bool, bias: bool) -> None:
    """h goes where the caller wants it, and nothing is written past the last row."""
    offsets, weights, x = offsets_of(SIZES), make_weights(len(SIZES), bias), bf16(sum(SIZES), HIDDEN)
    h = torch.full((sum(SIZES) + 5, 2 * WIDTH), 7, dtype=torch.bfloat16) if keeps_h else None
    expected_h = None if h is None else h.clone()
    expected = experts_forward(x, offsets.tolist(), weights, SWIGLU, expected_h)
    o = rows_forward(by_token(x), offsets, weights, SWIGLU, h, "staged")
    assert_equal_bits(by_row(o), expected, "o")
    if h is not None:
        assert_equal_bits(h, expected_h, "h")
    (call,) = launches
    assert call["staged"] is True
    assert call["h"].shape[0] == (sum(SIZES) if keeps_h else 0)
    assert keeps_h is (h is not None and call["h"].data_ptr() == h.data_ptr())


def backward_given() -> tuple[Tensor, Tensor, Tensor, Weights, Tensor]:
    """dy, routing weights, x, parameters and h, by row; h has rows past the last."""
    num_rows, weights = sum(SIZES), make_weights(len(SIZES))
    x = bf16(num_rows, HIDDEN)
    h = bf16(num_rows + 5, 2 * WIDTH)
    experts_forward(x, offsets_of(SIZES).tolist(), weights, SWIGLU, h)
    return bf16(num_rows, HIDDEN), torch.randn(num_rows), x, weights, h


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_backward_has_the_bits_of_the_reference(launches: Calls, recompute: bool) -> None:
    """For every set of wanted gradients; without any there is nothing to launch."""
    offsets, (dy, s, x, weights, h) = offsets_of(SIZES), backward_given()
    for mask in range(64):
        needs = unpack_needs(mask)
        x_rows = x if needs.w_gate_up or recompute else None
        h_rows = None if recompute else h
        expected = experts_backward(dy, s, x_rows, h_rows, offsets.tolist(), weights, SWIGLU, needs)
        x_tokens = None if x_rows is None else by_token(x_rows)
        rest: tuple[Any, ...] = (h_rows, offsets, weights, SWIGLU, needs, (None, None))
        actual = rows_backward(by_token(dy), by_token(s), x_tokens, *rest, "mega")
        for name, grad in vars(expected).items():
            found = getattr(actual, name)
            assert (found is None) == (grad is None), name
            if found is not None:
                assert_equal_bits(by_row(found) if name in ("dx_rows", "ds_rows") else found, grad, name)
        assert len(launches) == (mask > 0)
        launches.clear()


@pytest.mark.parametrize("given", [(False, True), (True, False), (True, True)], ids=str)
def test_main_gradients_are_added_to(launches: Calls, given: tuple[bool, bool]) -> None:
    offsets, (dy, s, x, weights, h) = offsets_of(SIZES), backward_given()
    shapes = (len(SIZES), 2 * WIDTH, HIDDEN), (len(SIZES), HIDDEN, WIDTH)
    start = [torch.randn(shape) if on else None for shape, on in zip(shapes, given, strict=True)]
    theirs, ours = ([None if m is None else m.clone() for m in start] for _ in range(2))
    expected = experts_backward(dy, s, x, h, offsets.tolist(), weights, SWIGLU, ALL, (theirs[0], theirs[1]))
    rest: tuple[Any, ...] = (h, offsets, weights, SWIGLU, ALL, (ours[0], ours[1]))
    actual = rows_backward(by_token(dy), by_token(s), by_token(x), *rest, "mega")
    for name, buffer, wanted in zip(("dw_gate_up", "dw_down"), ours, theirs, strict=True):
        if buffer is None:
            assert_equal_bits(getattr(actual, name), getattr(expected, name), name)
        else:
            assert getattr(actual, name) is None
            assert_equal_bits(buffer, wanted, name)
            assert buffer._version > 0


@pytest.mark.parametrize("experts", [0, 3])
def test_without_rows_or_experts_nothing_is_launched(launches: Calls, experts: int) -> None:
    offsets, weights, none = offsets_of([0] * experts), make_weights(experts), bf16(0, HIDDEN)
    h = bf16(4, 2 * WIDTH)
    kept = h.clone()
    assert rows_forward(none, offsets, weights, SWIGLU, h, "mega").shape == (0, HIDDEN)
    main = torch.ones(experts, HIDDEN, WIDTH)
    rest: tuple[Any, ...] = (offsets, weights, SWIGLU, ALL, (None, main))
    for h_rows in (h, None):
        grads = rows_backward(none, torch.empty(0), none, h_rows, *rest, "mega")
        assert grads.dx_rows is not None
        assert grads.dx_rows.shape == (0, HIDDEN)
        assert grads.ds_rows is not None
        assert grads.ds_rows.shape == (0,)
        assert grads.dw_down is None
        for grad in (grads.dw_gate_up, grads.dbias_gate_up, grads.dbias_down):
            assert grad is not None
            assert grad.shape[0] == experts
            assert not grad.any()
    assert_equal_bits(h, kept, "h")
    assert bool((main == 1).all())
    assert not launches
