"""What tests of the fused kernels share: where they run, inputs on the device, a float64 reference, and one check.

`check_layer` is what most cases call. It runs both backends on poisoned memory and a workspace full of NaN; compares
steps, steps that compute h again, backends and the route of the reference by bits, and all results with float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.steps import Results, assert_near, assert_same_bits, expected_step, run_step
from torch import Tensor

from moe_megakernel import config
from moe_megakernel.activations import resolve_activation
from moe_megakernel.backends import available_backends
from moe_megakernel.schemas import unpack_needs
from moe_megakernel.testing import DIFFERENTIABLE, LayerInputs, assert_equal_bits, plain_activation, poisoned_memory

KERNELS = ("mega", "staged")
#: `pytestmark` of a module that needs the kernels.
GPU = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
both_backends = pytest.mark.parametrize("backend", KERNELS)
#: Gradients that `layer_forward` is told of: all six.
ALL_NEEDS = 63


def missing_kernels() -> str:
    """Why the fused kernels cannot run here, or ""."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return available_backends("cuda", torch.cuda.get_device_capability())["mega"]


def set_num_sms(number: int | None) -> None:
    config.set_num_sms(number)  # type: ignore[attr-defined, unused-ignore]


def on_device(inputs: LayerInputs) -> LayerInputs:
    """The inputs in bfloat16 on the current CUDA device."""
    return inputs.to(torch.bfloat16, "cuda")


def oracle_by_expert(inputs: LayerInputs) -> Tensor:
    """y as `moe_megakernel.testing.oracle`, with one product per expert, in x's dtype; weights may be of another.

    Where the activation is clamped, h is rounded to bfloat16 as the layer does: beside a limit, the derivative of an
    unrounded h is another one.
    """
    y = torch.zeros_like(inputs.x)
    dtype, biases = inputs.x.dtype, (inputs.bias_gate_up, inputs.bias_down)
    parameters = [None if p is None else p.unbind() for p in (inputs.w_gate_up, inputs.w_down, *biases)]
    clamped = inputs.limit is not None or inputs.activation == "swiglu_oai"
    for e in inputs.topk_idx.unique().tolist():
        if e < 0:
            continue
        w_gate_up, w_down, bias_gate_up, bias_down = (None if p is None else p[e].to(dtype) for p in parameters)
        assert w_gate_up is not None
        assert w_down is not None
        token, k = (inputs.topk_idx == e).nonzero(as_tuple=True)
        h = inputs.x[token] @ w_gate_up.t()
        h = h if bias_gate_up is None else h + bias_gate_up
        if clamped:
            h = h + (h.bfloat16().to(dtype) - h).detach()
        o = plain_activation(h, inputs) @ w_down.t()
        o = o if bias_down is None else o + bias_down
        y = y.index_add(0, token, inputs.topk_weights[token, k, None] * o)
    return y


class Saved(NamedTuple):
    """What `layer_forward` returns for y and for backward; h without the rows past the last."""

    y: Tensor
    h: Tensor
    expert_offsets: Tensor
    row_route: Tensor


def saved(inputs: LayerInputs, backend: str, needs: int = ALL_NEEDS) -> Saved:
    """Calls the inner op."""
    act = resolve_activation(inputs.activation, inputs.alpha, inputs.limit)
    tensors = (inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.w_gate_up, inputs.w_down)
    biases = (inputs.bias_gate_up, inputs.bias_down, None, None)
    options = (act.name, act.alpha, act.limit, backend, needs, False)
    y, h, _, offsets, row_route = torch.ops.moe.layer_forward(*tensors, *biases, inputs.num_experts, *options)
    return Saved(y, h[: int(offsets[-1])], offsets, row_route)


def backward_arguments(y: Tensor, dy: Tensor | None = None) -> tuple[Any, ...]:
    """What autograd would hand to `layer_backward` for `y`, read from its node; dy of ones by default."""
    node: Any = y.grad_fn
    assert node is not None
    return (torch.ones_like(y) if dy is None else dy, *node.saved_tensors, *node.options)


def gradients(arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Calls the inner op of the backward; gradients by name, those that were not asked for are left out."""
    results = torch.ops.moe.layer_backward(*arguments)
    needs = unpack_needs(arguments[-2])
    return {name: grad for name, need, grad in zip(DIFFERENTIABLE, needs, results, strict=True) if need}


def fill_workspace(inputs: LayerInputs, backend: str) -> None:
    """A step whose rows are all NaN and all there, so that the next one finds them wherever it reads too far."""
    ids = torch.where(inputs.topk_idx < 0, 0, inputs.topk_idx)
    y = replace(inputs, x=torch.full_like(inputs.x, torch.nan), topk_idx=ids).leaves().call(backend=backend)
    y.backward(torch.full_like(y, torch.nan))


def kernel_step(inputs: LayerInputs, backend: str) -> Results:
    """y and gradients of one backend; a second step, one that computes h again and a call without gradients must have
    the same bits.
    """
    with poisoned_memory():
        fill_workspace(inputs, backend)
        first = run_step(inputs, backend=backend)
        assert_same_bits(run_step(inputs, backend=backend), first)
        fill_workspace(inputs, backend)
        assert_same_bits(run_step(inputs, backend=backend, recompute=True), first)
        with torch.no_grad():
            assert_equal_bits(inputs.call(backend=backend), first["y"], "y without gradients")
    return first


def check_layer(inputs: LayerInputs) -> Results:
    """Compares both backends with each other and with float64; returns y and gradients on the device."""
    inputs = on_device(inputs)
    results = kernel_step(inputs, "mega")
    assert_same_bits(kernel_step(inputs, "staged"), results)
    with poisoned_memory():
        mega, staged, reference = (saved(inputs, backend) for backend in (*KERNELS, "reference"))
    for name in Saved._fields:
        assert_equal_bits(getattr(staged, name), getattr(mega, name), name)
    assert_equal_bits(mega.y, results["y"], "y")
    assert_equal_bits(mega.expert_offsets, reference.expert_offsets, "expert_offsets")
    assert_equal_bits(mega.row_route, reference.row_route, "row_route")
    assert_near(results, expected_step(inputs, oracle=oracle_by_expert), torch.bfloat16)
    return results


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
