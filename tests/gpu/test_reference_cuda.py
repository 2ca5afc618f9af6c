"""The reference backend on a CUDA device: numbers, late errors, autocast, compile, refusal of graph capture."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.layers import backward_arguments

import moe_megakernel
from moe_megakernel.testing import (
    BF16_FORWARD,
    BF16_GRADIENT,
    LayerInputs,
    assert_close,
    assert_equal_bits,
    make_inputs,
    oracle,
    poisoned_memory,
    random_routing,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 3e-3),
    torch.bfloat16: (BF16_FORWARD, BF16_GRADIENT),
}


@pytest.fixture(autouse=True)
def _no_error_left():
    yield
    moe_megakernel.check_errors()


def cuda_inputs(dtype: torch.dtype, **options: object) -> tuple[LayerInputs, LayerInputs]:
    """Inputs on the device in `dtype`, and the same rounded values in float64 on the CPU."""
    base = make_inputs(random_routing(33, 5, 3, zipf=1.0, drop=0.2), 72, 40, 5, **options).to(dtype)
    return base.to(dtype, "cuda").leaves(), base.to(torch.float64).leaves()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu", "bias": True},
        {"activation": "relu2"},
        {"activation": "swiglu_oai"},
        {"activation": "geglu"},
    ],
    ids=lambda o: o["activation"],
)
def test_matches_the_oracle_for_two_steps_in_poisoned_memory(dtype, options):
    forward, gradient = TOLERANCE[dtype]
    inputs, exact = cuda_inputs(dtype, **options)
    dy = torch.randn(inputs.x.shape, dtype=dtype)
    expected = oracle(exact)
    expected.backward(dy.double())
    first = None
    with poisoned_memory():
        for _ in range(2):
            step = inputs.leaves()
            y = step.call(backend="reference")
            y.backward(dy.cuda())
            assert y.dtype == dtype
            assert_close(y, expected, forward, "y")
            for name, grad in step.grads().items():
                assert_close(grad, exact.grads()[name], gradient, name)
            if first is not None:
                assert_equal_bits(y, first[0], "y")
                for name, grad in step.grads().items():
                    assert_equal_bits(grad, first[1][name], name)
            first = (y, step.grads())


def test_int32_and_int64_ids_give_equal_bits():
    inputs, _ = cuda_inputs(torch.bfloat16)
    y64 = inputs.call(backend="reference")
    object.__setattr__(inputs, "topk_idx", inputs.topk_idx.int())
    assert_equal_bits(inputs.call(backend="reference"), y64)


def test_route_on_the_device_equals_the_cpu():
    for tokens, experts, top_k in ((0, 3, 2), (1, 1, 1), (200, 7, 3), (1000, 300, 8)):
        idx = random_routing(tokens, experts, top_k, zipf=1.0, drop=0.1, seed=tokens)
        for on_cpu, on_gpu in zip(
            torch.ops.moe.route(idx, experts), torch.ops.moe.route(idx.cuda(), experts), strict=True
        ):
            assert_equal_bits(on_gpu, on_cpu)


@pytest.mark.parametrize("bad", [5, -2, 2**32 + 1])
def test_invalid_id_gives_nan_and_the_error_comes_with_the_next_call(bad):
    inputs, _ = cuda_inputs(torch.float32)
    broken = inputs.leaves()
    broken.topk_idx[4, 1] = bad
    y = broken.call(backend="reference")
    y.sum().backward()
    assert y.isnan().all()
    assert all(grad.isnan().all() for grad in broken.grads().values())
    with pytest.raises(moe_megakernel.RoutingError, match=rf"topk_idx: expected .*got {bad} at topk_idx\[4, 1\]"):
        inputs.call(backend="reference")
    assert inputs.call(backend="reference").isfinite().all()


def test_check_errors_raises_once():
    inputs, _ = cuda_inputs(torch.float32)
    inputs.topk_idx[0, 0] = 99
    inputs.call(backend="reference")
    with pytest.raises(moe_megakernel.RoutingError, match="got 99"):
        moe_megakernel.check_errors()
    moe_megakernel.check_errors()


def test_autocast_runs_in_bf16_and_returns_gradients_in_the_parameters_dtype():
    inputs, exact = cuda_inputs(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        y = inputs.call(backend="reference")
    y.float().sum().backward()
    expected = oracle(exact)
    expected.sum().backward()
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, 2 * BF16_FORWARD)
    for name, grad in inputs.grads().items():
        assert grad.dtype == torch.float32
        assert_close(grad, exact.grads()[name], 2 * BF16_GRADIENT, name)


def test_compiled_gives_the_eager_bits():
    inputs, _ = cuda_inputs(torch.bfloat16)
    compiled = torch.compile(lambda step: step.call(backend="reference") * 1.0, fullgraph=True)
    eager_step, compiled_step = inputs.leaves(), inputs.leaves()
    y, z = eager_step.call(backend="reference") * 1.0, compiled(compiled_step)
    y.sum().backward()
    z.sum().backward()
    assert_equal_bits(z, y)
    for name, grad in eager_step.grads().items():
        assert_equal_bits(compiled_step.grads()[name], grad, name)


def test_graph_capture_is_refused_in_words():
    inputs, _ = cuda_inputs(torch.float32)
    inputs.call(backend="reference")
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(moe_megakernel.MoEError, match="backend: expected one without host synchronisation")
    with refused, torch.cuda.graph(graph):
        inputs.call(backend="reference")
    torch.cuda.synchronize()
    assert inputs.call(backend="reference").isfinite().all()


def test_graph_capture_of_a_backward_is_refused_in_words():
    inputs, _ = cuda_inputs(torch.float32)
    arguments = backward_arguments(inputs.call(backend="reference"))
    torch.ops.moe.layer_backward(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(moe_megakernel.MoEError, match="backend: expected one without host synchronisation")
    with refused, torch.cuda.graph(graph):
        torch.ops.moe.layer_backward(*arguments)
    torch.cuda.synchronize()
    assert inputs.call(backend="reference").isfinite().all()


def test_strided_inputs_and_an_expanded_gradient():
    inputs, exact = cuda_inputs(torch.float32)
    wide = torch.zeros(33, 144, device="cuda")
    wide[:, ::2] = inputs.x.detach()
    strided = wide[:, ::2].requires_grad_()
    object.__setattr__(inputs, "x", strided)
    inputs.call(backend="reference").sum().backward()
    oracle(exact).sum().backward()
    assert_close(strided.grad, exact.x.grad, 1e-5)
