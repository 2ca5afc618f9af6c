"""Cases A10 to A12 on the fused kernels: strides and alignment, dtypes of indices and values, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, fill_workspace, on_device
from tests.steps import Results, assert_same_bits, make_dy, name_of, run_step
from torch import Tensor

from moe_megakernel.testing import (
    DIFFERENTIABLE,
    LayerInputs,
    assert_equal_bits,
    make_inputs,
    poisoned_memory,
    random_routing,
)

pytestmark = GPU

#: Name -> (shape of the source, source -> [8, 64] view).
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "transposed": ((64, 8), lambda base: base.t()),
    "column slice": ((8, 128), lambda base: base[:, :64]),
    "column slice of odd rows": ((8, 67), lambda base: base[:, :64]),
    "odd column slice": ((8, 130), lambda base: base[:, 1:129:2]),
    "one row for all": ((1, 64), lambda base: base.expand(8, 64)),
    "one value a row": ((8, 1), lambda base: base.expand(8, 64)),
    "every other row": ((16, 64), lambda base: base[::2]),
    "one element further": ((8 * 64 + 1,), lambda base: base[1:].view(8, 64)),
    "eight elements further": ((8 * 64 + 8,), lambda base: base[8:].view(8, 64)),
}


def contiguous(inputs: LayerInputs) -> LayerInputs:
    """The same values in fresh memory."""
    given = {name: getattr(inputs, name) for name in (*DIFFERENTIABLE, "topk_idx")}
    copies: dict[str, Any] = {
        n: t.clone(memory_format=torch.contiguous_format) for n, t in given.items() if t is not None
    }
    return replace(inputs, **copies)


def step_of_views(inputs: LayerInputs, backend: str) -> Results:
    """`run_step` that leaves every tensor where it lies."""
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    views: dict[str, Any] = {n: t.detach().requires_grad_() for n, t in given.items() if t is not None}
    with poisoned_memory():
        fill_workspace(inputs, backend)
        y = replace(inputs, **views).call(backend=backend)
        y.backward(make_dy(y))
    return {"y": y.detach(), **{n: v.grad for n, v in views.items()}}


def check_views(inputs: LayerInputs, backend: str) -> None:
    assert_same_bits(step_of_views(inputs, backend), run_step(contiguous(inputs), backend=backend))


@pytest.mark.parametrize("layout", LAYOUTS)
@both_backends
def test_a10_strided_x(backend: str, layout: str) -> None:
    shape, view = LAYOUTS[layout]
    inputs = on_device(make_inputs(random_routing(8, 4, 2)))
    base = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    check_views(replace(inputs, x=view(base)), backend)

    leaf = base.clone().requires_grad_()
    y = replace(inputs, x=view(leaf)).call(backend=backend)
    y.backward(make_dy(y))
    again = base.clone().requires_grad_()
    dx = run_step(replace(inputs, x=view(base).contiguous()), backend=backend)["x"]
    view(again).backward(dx)
    assert_equal_bits(leaf.grad, again.grad, "source of x")


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name_of)
@both_backends
def test_a10_strided_routing(backend: str, index_dtype: torch.dtype) -> None:
    inputs = on_device(make_inputs(random_routing(8, 4, 2, drop=0.1)))
    ids = inputs.topk_idx.to(index_dtype)
    wide = torch.full((8, 5), 99, dtype=index_dtype, device="cuda")
    wide[:, 1:4:2] = ids
    weights = torch.full((8, 5), torch.nan, device="cuda")
    weights[:, 1:4:2] = inputs.topk_weights
    shifted = torch.cat([ids.new_zeros(1), ids.flatten()])[1:].view(8, 2)
    for topk_idx in (wide[:, 1:4:2], ids.t().contiguous().t(), ids[:1].expand(8, 2), shifted):
        check_views(replace(inputs, topk_idx=topk_idx), backend)
    row = inputs.topk_weights[:1]
    for topk_weights in (weights[:, 1:4:2], inputs.topk_weights.t().contiguous().t(), row.expand(8, 2)):
        check_views(replace(inputs, topk_idx=ids, topk_weights=topk_weights), backend)


def padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The tensor as a slice of a larger one that is NaN all around it."""
    first, middle, last = tensor.shape
    large = torch.full((first + 2, middle + rows, last + columns), torch.nan, dtype=tensor.dtype, device=tensor.device)
    large[1:-1, :middle, :last] = tensor
    return large[1:-1, :middle, :last]


def shifted(tensor: Tensor, elements: int) -> Tensor:
    """The tensor, contiguous, behind `elements` others in its storage."""
    return torch.cat([tensor.new_zeros(elements), tensor.flatten()])[elements:].view(tensor.shape)


#: Name -> a view with the same values, for w_gate_up and w_down.
WEIGHT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "aligned slice": lambda w: padded(w, 3, 8),
    "unaligned slice": lambda w: padded(w, 1, 3),
    "transposed storage": lambda w: w.mT.contiguous().mT,
    "experts innermost": lambda w: w.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "experts inside rows": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "one element further": lambda w: shifted(w, 1),
    "eight elements further": lambda w: shifted(w, 8),
    "one expert for all": lambda w: w[:1].expand(w.shape),
    "every other expert": lambda w: w.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@both_backends
def test_a10_strided_weights(backend: str, layout: str) -> None:
    view = WEIGHT_LAYOUTS[layout]
    inputs = on_device(make_inputs(random_routing(70, 4, 2), 136, 72, bias=True))
    check_views(replace(inputs, w_gate_up=view(inputs.w_gate_up), w_down=view(inputs.w_down)), backend)


@both_backends
def test_a10_strided_biases(backend: str) -> None:
    inputs = on_device(make_inputs(random_routing(70, 4, 2), bias=True))
    gate_up, down = inputs.bias_gate_up, inputs.bias_down
    assert gate_up is not None
    assert down is not None
    views = [(gate_up.t().contiguous().t(), down[:1].expand(4, 64)), (shifted(gate_up, 1), shifted(down, 3))]
    for bias_gate_up, bias_down in views:
        check_views(replace(inputs, bias_gate_up=bias_gate_up, bias_down=bias_down), backend)


@both_backends
def test_a10_expanded_gradient(backend: str) -> None:
    inputs = on_device(make_inputs(random_routing(8, 4, 2), bias=True))
    leaves = inputs.leaves()
    leaves.call(backend=backend).sum().backward()
    expected = run_step(inputs, dy=torch.ones_like(inputs.x), backend=backend)
    for name, gradient in leaves.grads().items():
        assert_equal_bits(gradient, expected[name], name)
    dy = torch.randn(64, 8, dtype=torch.bfloat16, device="cuda").t()
    assert_same_bits(run_step(inputs, dy=dy, backend=backend), run_step(inputs, dy=dy.contiguous(), backend=backend))


@both_backends
def test_a11_index_dtypes_agree(backend: str) -> None:
    inputs = on_device(make_inputs(random_routing(200, 12, 3, drop=0.2), 72, 64, 12, bias=True))
    narrow = replace(inputs, topk_idx=inputs.topk_idx.to(torch.int32))
    assert_same_bits(run_step(narrow, backend=backend), run_step(inputs, backend=backend))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.float32, torch.bool], ids=name_of)
@both_backends
def test_a11_other_dtypes_are_refused(backend: str, dtype: torch.dtype) -> None:
    inputs = on_device(make_inputs(random_routing(8, 4, 2)))
    with pytest.raises(TypeError, match=f"topk_idx: expected int32 or int64, got {name_of(dtype)}"):
        replace(inputs, topk_idx=inputs.topk_idx.to(dtype)).call(backend=backend)
    for name in ("w_gate_up", "w_down"):
        with pytest.raises(TypeError, match=f"{name}: expected bfloat16 with bfloat16 x, got float32"):
            replace(inputs, **{name: getattr(inputs, name).float()}).call(backend=backend)
    with pytest.raises(TypeError, match=r"topk_weights: expected float32 or .* with bfloat16 x, got float64"):
        replace(inputs, topk_weights=inputs.topk_weights.double()).call(backend=backend)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=name_of)
@both_backends
def test_a12_autocast(backend: str, w_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    """The op runs in the autocast dtype: bits of a manual cast; gradients come back in each input's dtype."""
    inputs = make_inputs(random_routing(64, 4, 2), 72, 64, bias=True, dtype=torch.float32).to(torch.float32, "cuda")
    mixed = replace(inputs.to(w_dtype), x=inputs.x.to(x_dtype), topk_weights=inputs.topk_weights)

    def call(leaves: LayerInputs) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return leaves.call(backend=backend)

    with poisoned_memory():
        results = run_step(mixed, call)
        expected = run_step(replace(mixed.to(torch.bfloat16), topk_weights=mixed.topk_weights), backend=backend)
    assert results["y"] is not None
    assert results["y"].dtype == torch.bfloat16
    for name, tensor in results.items():
        want = expected[name]
        assert want is not None
        assert_equal_bits(tensor, want if name == "y" else want.to(getattr(mixed, name).dtype), name)
