"""The fused kernels beside other work: streams, threads, foreign kernels; no waiting host, no memory but outputs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch
from tests.gpu.layers import ALL_NEEDS, GPU, both_backends, no_host_sync, on_device, set_num_sms
from torch import Tensor

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU


def layer(seed: int) -> LayerInputs:
    """One of four layers of different shapes."""
    tokens, hidden, width, experts, top_k = [
        (300, 136, 200, 6, 3),
        (64, 512, 256, 40, 8),
        (1500, 64, 72, 3, 2),
        (1, 1032, 8, 300, 4),
    ][seed % 4]
    ids = random_routing(tokens, experts, top_k, zipf=1.0, drop=0.1, seed=seed)
    return on_device(make_inputs(ids, hidden, width, experts, bias=seed % 2 == 0, seed=seed))


def run_on(stream: torch.cuda.Stream, inputs: LayerInputs, backend: str, repeats: int) -> list[Tensor]:
    """y of several calls on a stream, without gradients."""
    with torch.cuda.stream(stream), torch.no_grad():
        return [inputs.call(backend=backend) for _ in range(repeats)]


@both_backends
def test_layers_of_different_shapes_in_turns(backend: str) -> None:
    layers = [layer(seed) for seed in range(4)]
    with torch.no_grad():
        expected = [inputs.call(backend="mega") for inputs in layers]
        for turn in range(12):
            for number in range(4) if turn % 2 else reversed(range(4)):
                assert_equal_bits(layers[number].call(backend=backend), expected[number], f"layer {number}")


@both_backends
def test_backends_in_turns(backend: str) -> None:
    """Both use one workspace."""
    other = "staged" if backend == "mega" else "mega"
    inputs = layer(0)
    with torch.no_grad():
        expected = inputs.call(backend=backend)
        for turn in range(10):
            assert_equal_bits(inputs.call(backend=(backend, other)[turn % 2]), expected, f"turn {turn}")


@both_backends
def test_two_streams_at_once(backend: str) -> None:
    layers = [layer(0), layer(2)]
    expected = [inputs.call(backend=backend) for inputs in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    for _ in range(10):
        pairs = zip(streams, layers, strict=True)
        results = [run_on(stream, inputs, backend, 10) for stream, inputs in pairs]
        torch.cuda.synchronize()
        for ys, want in zip(results, expected, strict=True):
            for y in ys:
                assert_equal_bits(y, want)


@both_backends
def test_several_threads(backend: str) -> None:
    layers = [layer(seed) for seed in range(4)]
    expected = [inputs.call(backend=backend) for inputs in layers]
    torch.cuda.synchronize()

    def work(number: int) -> list[Tensor]:
        stream = torch.cuda.Stream()
        ys = run_on(stream, layers[number], backend, 40)
        stream.synchronize()
        return ys

    with ThreadPoolExecutor(len(layers)) as pool:
        for ys, want in zip(pool.map(work, range(len(layers))), expected, strict=True):
            for y in ys:
                assert_equal_bits(y, want)


@both_backends
def test_threads_on_one_stream(backend: str) -> None:
    layers = [layer(seed) for seed in range(4)]
    expected = [inputs.call(backend=backend) for inputs in layers]
    with ThreadPoolExecutor(len(layers)) as pool:
        jobs = [pool.submit(run_on, torch.cuda.current_stream(), layers[i % 4], backend, 10) for i in range(8)]
        for i, job in enumerate(jobs):
            for y in job.result():
                assert_equal_bits(y, expected[i % 4])


@both_backends
def test_the_host_never_waits(backend: str) -> None:
    inputs = layer(0)
    leaves = inputs.leaves()
    expected = inputs.call(backend=backend)
    torch.cuda.synchronize()
    with no_host_sync():
        with torch.no_grad():
            y = inputs.call(backend=backend)
        z = leaves.call(backend=backend)
    assert_equal_bits(y, expected)
    assert_equal_bits(z, expected)


@pytest.mark.parametrize("needs", [0, ALL_NEEDS], ids=["inference", "training"])
@both_backends
def test_no_memory_but_the_outputs(backend: str, needs: int) -> None:
    inputs = layer(0)
    biases = (inputs.bias_gate_up, inputs.bias_down)
    tensors = (inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, *biases, None, None)
    call: Callable[[], tuple[Tensor, ...]] = lambda: torch.ops.moe.layer_forward(  # noqa: E731
        *tensors, inputs.num_experts, "swiglu", 1.0, float("inf"), backend, needs, False
    )
    results = call()
    outputs = sum(tensor.numel() > 0 for tensor in results)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    again = call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == outputs
    assert_equal_bits(again[0], results[0])


@pytest.mark.parametrize("num_sms", [None, 64])
@both_backends
def test_beside_a_foreign_kernel(backend: str, num_sms: int | None) -> None:
    """40 blocks stay for 200 ms. A layer that takes all SMs still ends, and one that leaves some ends before them."""
    pytest.importorskip("triton")
    spinning = import_module("tests.gpu.spinning")
    inputs = layer(2)
    with torch.no_grad():
        expected = inputs.call(backend=backend)
        stream, foreign = torch.cuda.Stream(), torch.cuda.Stream()
        set_num_sms(num_sms)
        try:
            run_on(stream, inputs, backend, 1)
            spinning.occupy(foreign, 40, 0.01)  # compiles
            torch.cuda.synchronize()
            spent = spinning.occupy(foreign, 40, 200.0)
            ys = run_on(stream, inputs, backend, 2)
            if num_sms is not None:
                stream.synchronize()
                assert not foreign.query(), "the layer has waited for the foreign kernel"
            torch.cuda.synchronize()
        finally:
            set_num_sms(None)
    assert int(spent.min()) >= 200_000_000
    for y in ys:
        assert_equal_bits(y, expected)
