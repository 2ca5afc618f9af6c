"""Case A14 on the fused kernels: every set of wanted gradients, with h kept and recomputed; and case A16, main
gradients that are added to.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.cases.test_accumulation import MAIN, PARAMETERS, accumulate
from tests.gpu.layers import GPU, backward_arguments, both_backends, fill_workspace, on_device, oracle_by_expert
from tests.steps import assert_same_bits, expected_step, run_step
from torch import Tensor

from moe_megakernel.testing import (
    BF16_GRADIENT,
    DIFFERENTIABLE,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

pytestmark = GPU

LAYERS: dict[str, dict[str, Any]] = {"gated, biases": {"bias": True}, "plain": {"activation": "relu2"}}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", LAYERS)
@both_backends
def test_a14_every_set_of_gradients(backend: str, case: str, recompute: bool) -> None:
    """Bits of the full step; None for what is frozen."""
    inputs = on_device(make_inputs(random_routing(150, 5, 3, zipf=1.0, drop=0.1), 136, 72, 5, **LAYERS[case]))
    names = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
    with poisoned_memory():
        full = run_step(inputs, backend=backend)
        for mask in product((False, True), repeat=len(names)):
            if not any(mask):
                continue
            wanted = dict(zip(names, mask, strict=True))
            fill_workspace(inputs, backend)
            results = run_step(inputs, requires_grad=wanted, backend=backend, recompute=recompute)
            assert_same_bits(results, {n: t if wanted.get(n, True) else None for n, t in full.items()})


@both_backends
def test_no_gradient_at_all(backend: str) -> None:
    """The op with nothing to do does nothing."""
    *arguments, _, recompute = backward_arguments(on_device(make_inputs(random_routing(8, 4, 2))).leaves().call())
    arguments[-1] = backend
    assert not any(grad.numel() for grad in torch.ops.moe.layer_backward(*arguments, 0, recompute))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "geglu_tanh", "geglu_erf", "relu2"])
@both_backends
def test_recomputed_h_gives_the_bits_of_kept_h(backend: str, activation: str) -> None:
    ids = random_routing(700, 7, 3, zipf=1.0, drop=0.1)
    for bias in (False, True):
        inputs = on_device(make_inputs(ids, 264, 200, 7, bias=bias, activation=activation))
        with poisoned_memory():
            kept, recomputed = (run_step(inputs, backend=backend, recompute=r) for r in (False, True))
        assert_same_bits(recomputed, kept)


@both_backends
def test_a_forward_that_saw_no_gradient_coming_recomputes(backend: str) -> None:
    """The inner op called with needs = 0 keeps no h; a backward that comes all the same computes it."""
    inputs = on_device(make_inputs(random_routing(90, 4, 2), bias=True))
    leaves = inputs.leaves()
    biases = (leaves.bias_gate_up, leaves.bias_down, None, None)
    tensors = (leaves.x, leaves.topk_idx, leaves.topk_weights, leaves.w_gate_up, leaves.w_down, *biases)
    y, h, *_ = torch.ops.moe.layer_forward(*tensors, 4, "swiglu", 1.0, float("inf"), backend, 0, False)
    assert h.shape[0] == 0
    y.sum().backward()
    expected = run_step(inputs, dy=torch.ones_like(inputs.x), backend=backend)
    assert_same_bits({"y": y.detach(), **leaves.grads()}, expected)


# -- main gradients ----------------------------------------------------------------------------------------------------


def microbatches() -> list[LayerInputs]:
    """Three batches over the same parameters; expert 2 is busy, empty, busy."""
    first = on_device(make_inputs(random_routing(200, 4, 2), 136, 72, bias=True))
    shared = {name: getattr(first, name) for name in PARAMETERS}
    ids = [torch.tensor([0, 1, 3])[random_routing(90, 3, 2, seed=1)], random_routing(300, 4, 2, drop=0.3, seed=2)]
    return [first, *(replace(on_device(make_inputs(i, 136, 72, bias=True, seed=7)), **shared) for i in ids)]


def buffers(inputs: LayerInputs, value: float = 0.0) -> dict[str, Tensor]:
    """Main gradients of both weights."""
    return {MAIN[n]: torch.full_like(getattr(inputs, n), value, dtype=torch.float32) for n in MAIN}


@both_backends
def test_a16_into_main_grad(backend: str) -> None:
    """Sums over the batches near float64; one batch is the unrounded gradient; the bits of every repetition."""
    batches = microbatches()
    call = partial(LayerInputs.call, backend=backend)
    with poisoned_memory():
        for batch in batches:
            plain, main = accumulate([batch], call), buffers(batch)
            grads = accumulate([batch], call, **main)
            for name in PARAMETERS:
                got = main[MAIN[name]].to(torch.bfloat16) if name in MAIN else grads[name]
                assert_equal_bits(got, plain[name], name)
                assert name not in MAIN or grads[name] is None
        total = buffers(batches[0])
        accumulate(batches, call, **total)
        for _ in range(3):
            again = buffers(batches[0])
            accumulate(batches, call, **again)
            assert_same_bits(dict(again), dict(total))
    exact = [expected_step(batch, oracle=oracle_by_expert) for batch in batches]
    for name in MAIN:
        sums = torch.stack([step[name] for step in exact]).sum(0)  # type: ignore[misc]
        assert_close(total[MAIN[name]], sums, BF16_GRADIENT, name)


@both_backends
def test_a16_backends_add_the_same_bits(backend: str) -> None:
    batches = microbatches()
    totals = [buffers(batches[0]), buffers(batches[0])]
    for total, other in zip(totals, (backend, "mega"), strict=True):
        accumulate(batches, partial(LayerInputs.call, backend=other), **total)
    assert_same_bits(dict(totals[0]), dict(totals[1]))


@both_backends
def test_a16_an_empty_expert_changes_no_bit(backend: str) -> None:
    """Not even the sign of a zero."""
    batch = microbatches()[1]
    main = buffers(batch, -0.0)
    accumulate([batch], partial(LayerInputs.call, backend=backend), **main)
    for name, held in main.items():
        assert_equal_bits(held[2], torch.full_like(held[2], -0.0), name)
        assert bool(held[3].any()), name


@pytest.mark.parametrize("given", MAIN.values())
@both_backends
def test_a16_one_main_grad(backend: str, given: str) -> None:
    batch, call = microbatches()[0], partial(LayerInputs.call, backend=backend)
    plain, both = accumulate([batch], call), buffers(batch)
    accumulate([batch], call, **both)
    one = {given: torch.zeros_like(both[given])}
    grads = accumulate([batch], call, **one)
    assert_equal_bits(one[given], both[given])
    for name in PARAMETERS:
        assert_equal_bits(grads[name], None if MAIN.get(name) == given else plain[name], name)


@both_backends
def test_a16_strided_and_misaligned_buffers(backend: str) -> None:
    """They are added to, and nothing beside them is touched."""
    batch, call = microbatches()[0], partial(LayerInputs.call, backend=backend)
    zero = buffers(batch)
    accumulate([batch], call, **zero)
    gate_up, down = (zero[name] for name in MAIN.values())
    wide = torch.full((*gate_up.shape[:2], gate_up.shape[2] + 1), 5.0, device="cuda")
    flat = torch.full((down.numel() + 1,), -3.0, device="cuda")
    accumulate([batch], call, main_grad_gate_up=wide[:, :, 1:], main_grad_down=flat[1:].view(down.shape))
    assert_equal_bits(wide[:, :, 1:], gate_up + 5)
    assert_equal_bits(flat[1:].view(down.shape), down - 3)
    assert bool((wide[:, :, 0] == 5).all())
    assert float(flat[0]) == -3
