"""Case A16: gradients of several microbatches, one of which leaves an expert without tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.steps import assert_near, assert_same_bits, expected_step, make_dy, name_of
from torch import Tensor

from moe_megakernel.testing import (
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

PARAMETERS = ("w_gate_up", "w_down", "bias_gate_up", "bias_down")
MAIN = {"w_gate_up": "main_grad_gate_up", "w_down": "main_grad_down"}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def microbatches(dtype: torch.dtype) -> list[LayerInputs]:
    """Three batches over the same parameters; expert 2 is busy, empty, busy."""
    first = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    others = [torch.tensor([0, 1, 3])[random_routing(8, 3, 2, seed=1)], random_routing(6, 4, 2, drop=0.3, seed=2)]
    shared = {name: getattr(first, name) for name in PARAMETERS}
    batches = [first, *(replace(make_inputs(ids, bias=True, dtype=dtype, seed=7), **shared) for ids in others)]
    assert [2 in b.topk_idx for b in batches] == [True, False, True]
    return batches


def accumulate(batches: list[LayerInputs], call=LayerInputs.call, **main: Tensor) -> dict[str, Tensor | None]:  # type: ignore[no-untyped-def]
    """Backward of every batch into one set of parameters; their gradients."""
    shared = batches[0].leaves()
    for batch in batches:
        leaves = replace(batch.leaves(), **{name: getattr(shared, name) for name in PARAMETERS})
        y = call(leaves, **main)
        y.backward(make_dy(y))
    return {name: getattr(shared, name).grad for name in PARAMETERS}


def buffers(inputs: LayerInputs) -> dict[str, Tensor]:
    """Zero main gradients of both weights, in float32 (float64 for float64)."""
    dtype = inputs.topk_weights.dtype
    return {MAIN[name]: torch.zeros(getattr(inputs, name).shape, dtype=dtype) for name in MAIN}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a16_three_backward_calls(dtype: torch.dtype) -> None:
    batches = microbatches(dtype)
    with poisoned_memory():
        total = accumulate(batches)
        separate = [accumulate([batch]) for batch in batches]
        assert_same_bits(accumulate(batches), total)
    for name in PARAMETERS:
        a, b, c = (grads[name] for grads in separate)
        assert a is not None
        assert b is not None
        assert c is not None
        assert not b[2].any()
        assert_equal_bits(total[name], a + b + c, name)
    exact = [expected_step(batch) for batch in batches]
    sums = {name: torch.stack([e[name] for e in exact]).sum(0) for name in PARAMETERS}  # type: ignore[misc]
    assert_near(total, sums, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a16_into_main_grad(dtype: torch.dtype, compiled: bool) -> None:
    """Unrounded gradients are added in place, in the order of the calls; the weights' own gradients stay None."""
    call = torch.compile(LayerInputs.call, fullgraph=True, backend="aot_eager") if compiled else LayerInputs.call
    batches = microbatches(dtype)
    with poisoned_memory():
        plain = [accumulate([batch]) for batch in batches]
        single = [buffers(batch) for batch in batches]
        for batch, main in zip(batches, single, strict=True):
            accumulate([batch], call, **main)
        total = buffers(batches[0])
        grads = accumulate(batches, call, **total)
    for name in MAIN:
        assert grads[name] is None
        unrounded = [main[MAIN[name]] for main in single]
        for gradient, rounded in zip(unrounded, plain, strict=True):
            assert_equal_bits(gradient.to(dtype), rounded[name], name)
        assert_equal_bits(total[MAIN[name]], unrounded[0] + unrounded[1] + unrounded[2], name)
    for name in ("bias_gate_up", "bias_down"):
        parts = [g[name] for g in plain]
        assert_equal_bits(grads[name], parts[0] + parts[1] + parts[2], name)  # type: ignore[operator]
    exact = [expected_step(batch) for batch in batches]
    for name in MAIN:
        sums = torch.stack([e[name] for e in exact]).sum(0)  # type: ignore[misc]
        assert_close(total[MAIN[name]], sums, {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-2), name)


def test_a16_main_grad_keeps_what_it_holds() -> None:
    """A buffer is added to, also where an expert had no tokens, and also if it is a strided view."""
    batch = microbatches(torch.float32)[1]
    zero, held = buffers(batch), buffers(batch)
    wide = torch.full((4, 64, 65), 5.0)
    held = {"main_grad_gate_up": wide[:, :, 1:], "main_grad_down": torch.full((4, 64, 32), -3.0)}
    accumulate([batch], **zero)
    accumulate([batch], **held)
    assert_equal_bits(held["main_grad_gate_up"], zero["main_grad_gate_up"] + 5)
    assert_equal_bits(held["main_grad_down"], zero["main_grad_down"] - 3)
    assert (wide[:, :, 0] == 5).all()


@pytest.mark.parametrize("given", MAIN.values())
def test_a16_one_main_grad(given: str) -> None:
    batch = microbatches(torch.bfloat16)[0]
    plain, both = accumulate([batch]), buffers(batch)
    accumulate([batch], **both)
    one = {given: torch.zeros_like(both[given])}
    grads = accumulate([batch], **one)
    assert_equal_bits(one[given], both[given])
    for name in PARAMETERS:
        assert_equal_bits(grads[name], None if MAIN.get(name) == given else plain[name], name)


def test_a16_main_grad_of_frozen_weights_is_left_alone() -> None:
    batch = microbatches(torch.float32)[0]
    for frozen in ("w_gate_up", "w_down"):
        main = buffers(batch)
        leaves = batch.leaves(**{frozen: False})
        leaves.call(**main).sum().backward()
        assert not main[MAIN[frozen]].any()
        assert all(main[m].any() for n, m in MAIN.items() if n != frozen)
    main = buffers(batch)
    with torch.no_grad():
        batch.leaves().call(**main)
    assert not any(m.any() for m in main.values())
