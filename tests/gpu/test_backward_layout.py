"""Case A10 on the fused backward: the gradient of y in every layout, and what autograd may hand back moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, fill_workspace, on_device
from tests.gpu.test_forward_layout import LAYOUTS, shifted
from tests.steps import assert_same_bits, make_dy, run_step
from torch import Tensor

from moe_megakernel.testing import assert_equal_bits, make_inputs, poisoned_memory, random_routing

pytestmark = GPU


@pytest.mark.parametrize("layout", LAYOUTS)
@both_backends
def test_a10_layouts_of_dy(backend: str, layout: str) -> None:
    shape, view = LAYOUTS[layout]
    inputs = on_device(make_inputs(random_routing(8, 4, 2), bias=True))
    dy = view(torch.randn(shape, dtype=torch.bfloat16, device="cuda"))
    with poisoned_memory():
        fill_workspace(inputs, backend)
        results = run_step(inputs, dy=dy, backend=backend)
    copy = dy.clone(memory_format=torch.contiguous_format)
    assert_same_bits(results, run_step(inputs, dy=copy, backend=backend))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@both_backends
def test_a10_sum_backward(backend: str, recompute: bool) -> None:
    """dy is one element, expanded with strides of 0; also where it is expanded along the tokens alone."""
    inputs = on_device(make_inputs(random_routing(300, 4, 2, drop=0.1), 136, 72, bias=True))
    leaves = inputs.leaves()
    leaves.call(backend=backend, recompute=recompute).sum().backward()
    expected = run_step(inputs, dy=torch.ones_like(inputs.x), backend=backend)
    for name, gradient in leaves.grads().items():
        assert_equal_bits(gradient, expected[name], name)
    row = make_dy(inputs.x[:1])
    results = run_step(inputs, dy=row.expand(300, 136), backend=backend)
    assert_same_bits(results, run_step(inputs, dy=row.repeat(300, 1), backend=backend))


@both_backends
def test_saved_tensors_that_come_back_elsewhere(backend: str) -> None:
    """Hooks on saved tensors, as offloading sets them, return copies: contiguous or not, aligned or not."""
    inputs = on_device(make_inputs(random_routing(90, 5, 2, drop=0.1), 72, 136, 5, bias=True))
    expected = run_step(inputs, backend=backend)

    def move(tensor: Tensor) -> Tensor:
        return shifted(tensor, 1) if tensor.is_floating_point() else tensor.clone()

    for unpack in (torch.clone, move):
        leaves = inputs.leaves()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = leaves.call(backend=backend)
        y.backward(make_dy(y))
        assert_same_bits({"y": y.detach(), **leaves.grads()}, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@both_backends
def test_ids_of_every_layout(backend: str, index_dtype: torch.dtype) -> None:
    """The launch reads the caller's ids again, as they lie."""
    inputs = on_device(make_inputs(random_routing(70, 4, 2, drop=0.1), bias=True))
    ids = inputs.topk_idx.to(index_dtype)
    wide = torch.full((70, 5), 99, dtype=index_dtype, device="cuda")
    wide[:, 1:4:2] = ids
    expected = run_step(inputs, backend=backend)
    for given in (ids, wide[:, 1:4:2], ids.t().contiguous().t()):
        leaves = replace(inputs.leaves(), topk_idx=given)
        y = leaves.call(backend=backend)
        y.backward(make_dy(y))
        assert_same_bits({"y": y.detach(), **leaves.grads()}, expected)
