"""Errors of CUDA steps are raised late. The logic, and what such a step returns, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.steps import assert_same_bits, make_dy, name_of, run_step

import moe_megakernel
from moe_megakernel import errors
from moe_megakernel.errors import MoEError, RoutingError
from moe_megakernel.reference import layer
from moe_megakernel.testing import LayerInputs, make_inputs, poisoned_memory, random_routing

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    errors._pending.clear()
    yield
    errors._pending.clear()


def test_first_error_of_a_device_is_kept() -> None:
    errors.defer(FIRST, RoutingError("one"))
    errors.defer(FIRST, MoEError("two"))
    errors.raise_pending(SECOND)
    with pytest.raises(RoutingError, match="one"):
        errors.raise_pending(FIRST)
    errors.raise_pending(FIRST)


def test_check_errors_raises_and_forgets_all() -> None:
    initialized = torch.cuda.is_initialized()
    moe_megakernel.check_errors()
    errors.defer(FIRST, MoEError("one"))
    errors.defer(SECOND, MoEError("two"))
    with pytest.raises(MoEError, match="one"):
        moe_megakernel.check_errors()
    moe_megakernel.check_errors()
    errors.raise_pending(SECOND)
    assert torch.cuda.is_initialized() == initialized


def test_the_next_call_on_the_device_raises() -> None:
    inputs = make_inputs(random_routing(8, 4, 2))
    expected = run_step(inputs)
    errors.defer(FIRST, MoEError("of another device"))
    assert_same_bits(run_step(inputs), expected)
    errors.defer(torch.device("cpu"), MoEError("of an earlier step"))
    with pytest.raises(MoEError, match="of an earlier step"):
        inputs.call()
    assert_same_bits(run_step(inputs), expected)
    with pytest.raises(MoEError, match="of another device"):
        moe_megakernel.check_errors()


def test_refuse_raises_on_cpu_and_defers_on_cuda() -> None:
    with pytest.raises(RoutingError, match="now"):
        layer.refuse(torch.device("cpu"), RoutingError("now"))
    layer.refuse(FIRST, RoutingError("later"))
    with pytest.raises(RoutingError, match="later"):
        errors.raise_pending(FIRST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_refused_step_is_nan_everywhere(recompute: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """y, every gradient and the main gradients; the error waits for the next call, which is then right again."""
    good = make_inputs(random_routing(8, 4, 2), bias=True, dtype=dtype)
    expected = run_step(good)
    ids = good.topk_idx.clone()
    ids[3, 1] = 4
    monkeypatch.setattr(layer, "refuse", lambda device, error: errors.defer(device, error))
    with poisoned_memory():
        broken = replace(good, topk_idx=ids)
        results = run_step(broken, recompute=recompute)
    for name, tensor in results.items():
        assert tensor is not None
        assert tensor.shape == getattr(good, "x" if name == "y" else name).shape
        assert tensor.isnan().all(), name
    with pytest.raises(RoutingError, match=r"got 4 at topk_idx\[3, 1\]"):
        good.call()
    assert_same_bits(run_step(good), expected)

    main = {
        "main_grad_gate_up": torch.zeros(good.w_gate_up.shape),
        "main_grad_down": torch.zeros(good.w_down.shape),
    }
    leaves: LayerInputs = broken.leaves()
    y = leaves.call(recompute=recompute, **main)
    y.backward(make_dy(y))
    assert all(m.isnan().all() for m in main.values())
    assert leaves.w_down.grad is None
