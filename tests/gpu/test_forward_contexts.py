"""Calls that go from C++ to the launch without Python: which do, that they give the same bits, and what stops them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, on_device, set_num_sms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moe_megakernel
from moe_megakernel import contexts
from moe_megakernel.hopper import forward
from moe_megakernel.hopper.testing import logged
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU

ACTIVATIONS = ("swiglu", "swiglu_oai", "geglu_tanh", "geglu_erf", "relu2")


@pytest.fixture
def through_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows by one with every launch from Python."""
    contexts.forget()
    calls: list[int] = []
    launch = forward._launch

    def count(*args: Any) -> None:
        calls.append(1)
        launch(*args)

    monkeypatch.setattr(forward, "_launch", count)
    yield calls
    contexts.forget()


def layer(activation: str = "swiglu", bias: bool = False, tokens: int = 300, seed: int = 0) -> LayerInputs:
    ids = random_routing(tokens, 6, 3, zipf=1.0, drop=0.1, seed=seed)
    return on_device(make_inputs(ids, 136, 200, 6, activation=activation, bias=bias, seed=seed))


def results(inputs: LayerInputs, backend: str, needs: int, recompute: bool, *, direct: bool) -> tuple[Tensor, ...]:
    options = (inputs.activation, 1.5, 7.0, backend, needs, recompute)
    tensors = (inputs.x, inputs.topk_idx, inputs.topk_weights.float(), inputs.w_gate_up, inputs.w_down)
    biases = (inputs.bias_gate_up, inputs.bias_down, None, None)
    op = torch.ops.moe.layer_forward_direct if direct else torch.ops.moe.layer_forward
    return op(*tensors, *biases, 6, *options)


@both_backends
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_same_results(through_python: list[int], backend: str, activation: str, bias: bool) -> None:
    inputs = layer(activation, bias)
    for needs, recompute in ((0, False), (63, False), (63, True)):
        contexts.forget()
        assert [r.shape for r in results(inputs, backend, needs, recompute, direct=True)] == [(0,)] * 5, "refused"
        expected = results(inputs, backend, needs, recompute, direct=False)
        before = len(through_python)
        got = results(inputs, backend, needs, recompute, direct=True)
        assert len(through_python) == before
        rows = int(expected[3][-1])
        for name, one, other in zip(("y", "h", "anchor", "offsets", "row_route"), got, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype, one.device) == (
                other.shape,
                other.stride(),
                other.dtype,
                other.device,
            )
            filled = slice(rows) if name in ("h", "row_route") else slice(None)
            assert_equal_bits(one[filled], other[filled], name)


def test_gradients(through_python: list[int]) -> None:
    inputs = layer(bias=True)

    def step() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (inputs.x, inputs.topk_weights, inputs.w_gate_up, inputs.w_down)]
        x, weights, w_gate_up, w_down = leaves
        given = replace(inputs, x=x, topk_weights=weights, w_gate_up=w_gate_up, w_down=w_down)
        y = given.call(backend="mega")
        y.backward(torch.ones_like(y))
        return [y, *(leaf.grad for leaf in leaves)]

    step()
    expected = step()  # what the first backward has made larger is kept now
    before = len(through_python)
    for one, other in zip(step(), expected, strict=True):
        assert_equal_bits(one, other, "step")
    assert len(through_python) == before


def _bigger() -> None:
    with torch.no_grad():
        layer(tokens=3000).call(backend="mega")


def _log() -> None:
    with logged():
        pass


def _timeout() -> None:
    moe_megakernel.set_timeout(moe_megakernel.get_timeout())


CHANGES: dict[str, Callable[[], None]] = {
    "settings": _timeout,
    "memory given back": moe_megakernel.release_workspaces,
    "a larger layer": _bigger,
    "hooks": _log,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_go_through_python_once(through_python: list[int], change: str) -> None:
    moe_megakernel.release_workspaces()  # so that the larger layer asks for a larger workspace
    inputs = layer()
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        before = len(through_python)
        CHANGES[change]()
        for _ in range(3):
            assert_equal_bits(inputs.call(backend="mega"), expected, change)
    assert len(through_python) == before + 1


def test_the_environment_is_heard(through_python: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = layer()
    set_num_sms(None)
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        for number, sms in enumerate(("8", "16")):
            monkeypatch.setenv("MOE_MEGAKERNEL_NUM_SMS", sms)
            assert os.environ["MOE_MEGAKERNEL_NUM_SMS"] == sms
            for _ in range(2):
                assert_equal_bits(inputs.call(backend="mega"), expected, sms)
            assert len(through_python) == number + 2


@pytest.mark.parametrize("odd", ["x", "w_gate_up", "w_down"])
def test_tensors_that_must_be_copied(through_python: list[int], odd: str) -> None:
    inputs = layer()
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        tensor = getattr(inputs, odd)
        shifted = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        shifted.copy_(tensor)
        for number in range(2):
            assert_equal_bits(replace(inputs, **{odd: shifted}).call(backend="mega"), expected, odd)
            assert len(through_python) == number + 2


def test_streams_have_contexts_of_their_own(through_python: list[int]) -> None:
    inputs, stream = layer(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        with torch.cuda.stream(stream):
            ys = [inputs.call(backend="mega") for _ in range(2)]
        stream.synchronize()
        for y in ys:
            assert_equal_bits(y, expected, "stream")
        inputs.call(backend="mega")
    assert len(through_python) == 2


def test_capture_goes_through_python(through_python: list[int]) -> None:
    inputs = layer()
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = inputs.call(backend="mega")
        assert len(through_python) == 2
        graph.replay()
        assert_equal_bits(y, expected, "replay")
        inputs.call(backend="mega")
    assert len(through_python) == 2


def test_what_is_recorded_never_refuses(through_python: list[int]) -> None:
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = layer()
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        inputs.call(backend="mega")
        assert len(through_python) == 1
        with Names():
            assert_equal_bits(inputs.call(backend="mega"), expected, "in the mode")
    assert "moe.layer_forward.default" in names
    assert "moe.layer_forward_direct.default" not in names


def test_no_tokens(through_python: list[int]) -> None:
    inputs = layer()
    with torch.no_grad():
        inputs.call(backend="mega")
        empty = replace(inputs, x=inputs.x[:0], topk_idx=inputs.topk_idx[:0], topk_weights=inputs.topk_weights[:0])
        assert empty.call(backend="mega").shape == (0, 136)


def test_the_error_of_a_direct_call_is_raised_by_the_next(through_python: list[int]) -> None:
    inputs = layer()
    bad = inputs.topk_idx.clone()
    bad[3, 1] = 6
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        y = replace(inputs, topk_idx=bad).call(backend="mega")
        torch.cuda.synchronize()
        assert len(through_python) == 1
        assert y.isnan().all()
        with pytest.raises(moe_megakernel.RoutingError, match=r"got 6 at topk_idx\[3, 1\]"):
            inputs.call(backend="mega")
        for _ in range(2):
            assert_equal_bits(inputs.call(backend="mega"), expected, "after the error")
    assert len(through_python) == 2


def test_wrong_shapes_are_refused(through_python: list[int]) -> None:
    inputs = layer()
    results(inputs, "mega", 0, False, direct=False)
    with pytest.raises(RuntimeError, match="w_down: expected"):
        results(replace(inputs, w_down=inputs.w_down[:, :128].contiguous()), "mega", 0, False, direct=True)


def test_memory_that_is_not_there(through_python: list[int]) -> None:
    inputs = layer(tokens=50_000)  # whose y fits no memory that torch has already
    with torch.no_grad():
        expected = inputs.call(backend="mega")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-6)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                inputs.call(backend="mega")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert_equal_bits(inputs.call(backend="mega"), expected, "afterwards")
