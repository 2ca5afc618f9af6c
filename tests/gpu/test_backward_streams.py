"""The fused backward beside other work: layers in turns, streams, threads; no waiting host, no memory but gradients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.gpu.layers import GPU, backward_arguments, both_backends, gradients, no_host_sync
from tests.gpu.test_forward_streams import layer
from tests.steps import Results, assert_same_bits, make_dy, run_step

from moe_megakernel.hopper.workspaces import release_workspaces, workspaces_bytes
from moe_megakernel.testing import LayerInputs

pytestmark = GPU


@both_backends
def test_layers_interleaved(backend: str) -> None:
    """All forwards, then all backwards in the order of autograd, then in another one; one workspace serves them all."""
    layers = [layer(seed) for seed in range(4)]
    expected = [run_step(inputs, backend=backend) for inputs in layers]
    for order in ((3, 2, 1, 0), (1, 3, 0, 2)):
        leaves = [inputs.leaves() for inputs in layers]
        ys = [given.call(backend=backend) for given in leaves]
        for number in order:
            ys[number].backward(make_dy(ys[number]))
        for y, given, want in zip(ys, leaves, expected, strict=True):
            assert_same_bits({"y": y.detach(), **given.grads()}, want)


@both_backends
def test_backends_in_turns(backend: str) -> None:
    """Forward by one, backward of the other's in between: both use one workspace."""
    other = "staged" if backend == "mega" else "mega"
    inputs = layer(0)
    expected = run_step(inputs, backend=backend)
    for turn in range(6):
        assert_same_bits(run_step(inputs, backend=(backend, other)[turn % 2]), expected)


def steps_on(stream: torch.cuda.Stream, inputs: LayerInputs, backend: str, repeats: int) -> list[Results]:
    with torch.cuda.stream(stream):
        return [run_step(inputs, backend=backend) for _ in range(repeats)]


@both_backends
def test_two_streams_at_once(backend: str) -> None:
    """Autograd runs a backward on its forward's stream, and so in that stream's workspace."""
    layers = [layer(0), layer(2)]
    expected = [run_step(inputs, backend=backend) for inputs in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    for _ in range(5):
        pairs = zip(streams, layers, strict=True)
        found = [steps_on(stream, inputs, backend, 5) for stream, inputs in pairs]
        torch.cuda.synchronize()
        for steps, want in zip(found, expected, strict=True):
            for step in steps:
                assert_same_bits(step, want)


@both_backends
def test_several_threads(backend: str) -> None:
    layers = [layer(seed) for seed in range(4)]
    expected = [run_step(inputs, backend=backend) for inputs in layers]
    torch.cuda.synchronize()

    def work(number: int) -> list[Results]:
        stream = torch.cuda.Stream()
        steps = steps_on(stream, layers[number], backend, 10)
        stream.synchronize()
        return steps

    with ThreadPoolExecutor(len(layers)) as pool:
        for steps, want in zip(pool.map(work, range(len(layers))), expected, strict=True):
            for step in steps:
                assert_same_bits(step, want)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@both_backends
def test_the_host_never_waits(backend: str, recompute: bool) -> None:
    inputs = layer(0)
    expected = run_step(inputs, backend=backend)
    leaves, dy = inputs.leaves(), make_dy(inputs.x)
    torch.cuda.synchronize()
    with no_host_sync():
        y = leaves.call(backend=backend, recompute=recompute)
        y.backward(dy)
    assert_same_bits({"y": y.detach(), **leaves.grads()}, expected)


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen weights"])
@both_backends
def test_no_memory_but_the_gradients(backend: str, frozen: bool) -> None:
    inputs = layer(0)
    wanted = {"w_gate_up": not frozen, "w_down": not frozen}
    arguments = backward_arguments(inputs.leaves(**wanted).call(backend=backend), make_dy(inputs.x))
    results = gradients(arguments)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    again = gradients(arguments)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == len(results)
    assert_same_bits(dict(again), dict(results))


@both_backends
def test_one_workspace_for_both_directions(backend: str) -> None:
    """As large as the larger of them needs; it is not grown by the next step."""
    inputs = layer(0)
    release_workspaces()
    run_step(inputs, backend=backend)
    kept = workspaces_bytes()
    assert kept > 0
    run_step(inputs, backend=backend)
    assert workspaces_bytes() == kept
