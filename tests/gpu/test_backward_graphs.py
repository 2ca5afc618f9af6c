"""Case A20 on whole steps: forward and backward in one CUDA graph; replays with other routings give the eager bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends
from tests.gpu.test_backward_needs import buffers
from tests.gpu.test_forward_graphs import EXPERTS, layer_of, other_routings
from tests.steps import Results, assert_same_bits, make_dy, run_step
from torch import Tensor

import moe_megakernel
from moe_megakernel.testing import DIFFERENTIABLE, LayerInputs, assert_equal_bits

pytestmark = GPU


class CapturedStep:
    """One captured step. Replays read what `replay` copies to the places that the capture saw."""

    def __init__(self, inputs: LayerInputs, backend: str, recompute: bool = False, **main: Tensor) -> None:
        self.backend, self.recompute = backend, recompute
        self.leaves, self.dy = inputs.leaves(), make_dy(inputs.x)
        names = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
        self.names = [name for name in names if not main or name not in ("w_gate_up", "w_down")]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is allocated once for a device is not part of a graph
            self._step(main)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y, self.grads = self._step(main)

    def _step(self, main: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.leaves.call(backend=self.backend, recompute=self.recompute, **main)
        return y, torch.autograd.grad(y, [getattr(self.leaves, name) for name in self.names], self.dy)

    def results(self) -> Results:
        return {"y": self.y.detach().clone(), **{n: g.clone() for n, g in zip(self.names, self.grads, strict=True)}}

    def replay(self, given: LayerInputs) -> Results:
        with torch.no_grad():
            for name in ("x", "topk_idx", "topk_weights"):
                getattr(self.leaves, name).copy_(getattr(given, name))
        self.graph.replay()
        return self.results()

    def check(self, given: LayerInputs) -> None:
        """A replay gives the bits of an eager step; once more, too."""
        expected = run_step(given, dy=self.dy, backend=self.backend, recompute=self.recompute)
        assert_same_bits(self.replay(given), expected)
        self.graph.replay()
        assert_same_bits(self.results(), expected)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tokens", [16, 300])
@both_backends
def test_a20_other_routing_than_captured(backend: str, tokens: int, recompute: bool) -> None:
    inputs = layer_of(tokens)
    captured = CapturedStep(inputs, backend, recompute)
    for given in other_routings(inputs).values():
        captured.check(given)


@both_backends
def test_a20_several_graphs_replayed_in_turns(backend: str) -> None:
    graphs = {tokens: CapturedStep(layer_of(tokens), backend) for tokens in (1, 4, 64)}
    for turn in range(3):
        for tokens, captured in graphs.items() if turn % 2 else reversed(graphs.items()):
            captured.check(layer_of(tokens, seed=turn))


@both_backends
def test_a20_replays_one_after_the_other(backend: str) -> None:
    """Without a host in between: launches of a graph follow each other on the stream."""
    inputs = layer_of(64)
    captured = CapturedStep(inputs, backend)
    expected = captured.replay(inputs)
    for _ in range(100):
        captured.graph.replay()
    assert_same_bits(captured.results(), expected)


@both_backends
def test_a20_main_gradients_grow_with_every_replay(backend: str) -> None:
    inputs = layer_of(40)
    main, eager = buffers(inputs), buffers(inputs)
    captured = CapturedStep(inputs, backend, **main)
    for tensor in main.values():
        tensor.zero_()  # the warm-up has added to it
    for turn in range(3):
        given = layer_of(40, seed=turn)
        captured.replay(given)
        leaves = given.leaves()
        leaves.call(backend=backend, **eager).backward(captured.dy)
        for name in main:
            assert_equal_bits(main[name], eager[name], f"{name}, turn {turn}")


@both_backends
def test_a20_invalid_id_in_a_replay(backend: str) -> None:
    """NaN everywhere, and the error is raised by `check_errors`; the next replay is right."""
    inputs = layer_of(16)
    captured = CapturedStep(inputs, backend)
    ids = inputs.topk_idx.clone()
    ids[9, 2] = EXPERTS
    for name, tensor in captured.replay(replace(inputs, topk_idx=ids)).items():
        assert tensor is not None, name
        assert tensor.isnan().all(), name
    with pytest.raises(moe_megakernel.RoutingError, match=rf"got {EXPERTS} at topk_idx\[9, 2\]"):
        moe_megakernel.check_errors()
    captured.check(inputs)
