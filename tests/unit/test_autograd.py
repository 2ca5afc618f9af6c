"""The op's gradients: gradcheck for every activation, double backward refused, forwards without gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from tests.steps import ACTIVATION_CASES, ALL_DTYPES, check_step, make_dy, name_of, run_step
from torch import Tensor

from moe_megakernel.reference.experts import Needs
from moe_megakernel.schemas import pack_needs, unpack_needs
from moe_megakernel.testing import (
    DIFFERENTIABLE,
    LayerInputs,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

#: Values of h at these seeds keep clear of the limits by more than a rounding to bfloat16, where a derivative jumps.
CLEAR_SEED = 5


def differentiable(inputs: LayerInputs) -> dict[str, Tensor]:
    return {name: tensor for name in DIFFERENTIABLE if (tensor := getattr(inputs, name)) is not None}


def call_with(inputs: LayerInputs, **tensors: Any) -> Tensor:
    return replace(inputs, **tensors).call()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_gradcheck(case: dict[str, Any], bias: bool) -> None:
    inputs = make_inputs(random_routing(5, 3, 2, drop=0.2), 4, 3, 3, bias=bias, seed=1, **case).leaves()
    names = list(differentiable(inputs))

    def call(*tensors: Tensor) -> Tensor:
        return call_with(inputs, **dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(call, list(differentiable(inputs).values()))
    if not bias:
        assert torch.autograd.gradcheck(
            lambda *t: replace(inputs, **dict(zip(names, t, strict=True))).call(recompute=True),
            list(differentiable(inputs).values()),
        )


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_against_the_oracle(case: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype, seed=CLEAR_SEED, **case)
    saved = check_step(inputs)
    recomputed = check_step(inputs, recompute=True)
    for name, tensor in saved.items():
        assert_equal_bits(recomputed[name], tensor, name)


REFUSED = "double backward is not supported: gradients of the layer can be taken once"
MASKS = [mask for mask in product((False, True), repeat=6) if any(mask)]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: "".join("01"[b] for b in m))
def test_double_backward_is_refused(mask: tuple[bool, ...]) -> None:
    """In words, whatever requires grad, and also with allow_unused=True, which would turn a lost path into None."""
    wanted = dict(zip(DIFFERENTIABLE, mask, strict=True))
    for activation, recompute in (("swiglu", False), ("relu2", True)):
        inputs = make_inputs(random_routing(4, 3, 2), 6, 4, 3, bias=True, activation=activation)
        leaves = inputs.leaves(**wanted)
        asked = [getattr(leaves, name) for name, on in wanted.items() if on]
        y = leaves.call(recompute=recompute)
        grads = torch.autograd.grad(y.sum(), asked, create_graph=True)
        total = sum((g.square().sum() for g in grads), torch.zeros(()))
        for target in asked:
            for allow_unused in (False, True):
                with pytest.raises(RuntimeError, match=REFUSED):
                    torch.autograd.grad(total, target, allow_unused=allow_unused, retain_graph=True)
        with pytest.raises(RuntimeError, match=REFUSED):
            total.backward()


def test_double_backward_towards_dy_is_refused() -> None:
    """A Hessian-vector product reaches the layer through dy as well."""
    leaves = make_inputs(random_routing(4, 3, 2), 6, 4, 3).leaves()
    y = leaves.call()
    (dx,) = torch.autograd.grad(y.square().sum(), leaves.x, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(dx.sum(), leaves.x, allow_unused=True)
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(leaves.call(), leaves.x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(dx.sum(), dy, allow_unused=True)


def test_gradients_that_are_not_differentiated_may_keep_a_graph() -> None:
    """create_graph alone is no error and changes no bit; with a main gradient it is refused, and nothing is added."""
    inputs = make_inputs(random_routing(8, 4, 2), dtype=torch.float32)
    expected = run_step(inputs)
    leaves = inputs.leaves()
    y = leaves.call()
    grads = torch.autograd.grad(y, list(differentiable(leaves).values()), make_dy(y), create_graph=True)
    for name, gradient in zip(differentiable(leaves), grads, strict=True):
        assert_equal_bits(gradient, expected[name], name)
    main = torch.zeros_like(leaves.w_down)
    y = leaves.call(main_grad_down=main)
    with pytest.raises(RuntimeError, match="with main_grad not even that"):
        torch.autograd.grad(y, leaves.w_down, make_dy(y), create_graph=True)
    assert not main.any()


def test_gradgradcheck_does_not_pass_silently() -> None:
    inputs = make_inputs(random_routing(3, 2, 1), 3, 2, 2).leaves()
    names = list(differentiable(inputs))
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.gradgradcheck(
            lambda *t: call_with(inputs, **dict(zip(names, t, strict=True))), list(differentiable(inputs).values())
        )


def test_forward_without_gradients() -> None:
    """Same bits with and without grad mode, in inference mode, and for inputs that ask for nothing."""
    inputs = make_inputs(random_routing(8, 4, 2, drop=0.2), bias=True, dtype=torch.bfloat16)
    expected = run_step(inputs)["y"]
    leaves = inputs.leaves()
    with poisoned_memory():
        plain = inputs.call()
        with torch.no_grad():
            without = leaves.call()
        with torch.inference_mode():
            inference = leaves.call()
            again = inputs.leaves().call()  # parameters that are inference tensors themselves
    for y in (plain, without, inference, again):
        assert not y.requires_grad
        assert_equal_bits(y, expected)
    assert inference.is_inference()
    assert not without.is_inference()


@pytest.mark.parametrize(("needs", "recompute", "rows"), [(0, False, 0), (0, True, 0), (63, True, 0), (1, False, 16)])
def test_h_is_kept_only_for_gradients(needs: int, recompute: bool, rows: int) -> None:
    """The inner op gives h [T * K, 2I], or [0, 2I] where no backward will read it."""
    i = make_inputs(random_routing(8, 4, 2), dtype=torch.float32)
    options = ("swiglu", 1.0, float("inf"), "reference", needs, recompute)
    y, h, anchor, offsets, routes = torch.ops.moe.layer_forward(
        i.x, i.topk_idx, i.topk_weights, i.w_gate_up, i.w_down, None, None, None, None, 4, *options
    )
    assert h.shape == (rows, 64)
    assert (y.shape, anchor.shape, offsets.shape, routes.shape) == ((8, 64), (0,), (5,), (16,))


def test_needs_pack_and_unpack() -> None:
    for mask in range(64):
        assert pack_needs(unpack_needs(mask)) == mask
    assert unpack_needs(0b000101) == Needs(True, False, True, False, False, False)


def test_backward_twice_over_a_kept_graph() -> None:
    """retain_graph gives the same bits again: backward changes nothing that was saved."""
    leaves = make_inputs(random_routing(8, 4, 2), bias=True, dtype=torch.float32).leaves()
    y = leaves.call()
    tensors = list(differentiable(leaves).values())
    first = torch.autograd.grad(y, tensors, make_dy(y), retain_graph=True)
    second = torch.autograd.grad(y, tensors, make_dy(y))
    for name, a, b in zip(DIFFERENTIABLE, first, second, strict=True):
        assert_equal_bits(b, a, name)


def test_unused_output_gives_no_gradient() -> None:
    """Where nothing depends on y, autograd never calls the layer's backward."""
    leaves = make_inputs(random_routing(8, 4, 2)).leaves()
    y = leaves.call()
    (leaves.x.sum() + 0 * y.detach().sum()).backward()
    assert leaves.w_down.grad is None


def test_in_place_changes_are_caught() -> None:
    """Autograd's version counters see the saved tensors: a weight changed between forward and backward is an error."""
    leaves = make_inputs(random_routing(8, 4, 2)).leaves()
    y = leaves.call()
    with torch.no_grad():
        leaves.w_down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
