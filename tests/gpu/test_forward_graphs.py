"""Case A20 on the fused kernels: CUDA graphs captured at one routing and replayed with others give the eager bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, on_device
from torch import Tensor

import moe_megakernel
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU

HIDDEN, WIDTH, EXPERTS, TOP_K = 136, 72, 8, 4


class Captured:
    """One captured call. Replays read what `replay` copies to the places that the capture saw."""

    def __init__(self, inputs: LayerInputs, backend: str) -> None:
        self.backend = backend
        copies = {n: getattr(inputs, n).clone() for n in ("x", "topk_idx", "topk_weights")}
        self.inputs = replace(inputs, **copies)
        with torch.no_grad():
            self.inputs.call(backend=backend)  # what is allocated once for a device is not part of a graph
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self.inputs.call(backend=backend)

    def replay(self, given: LayerInputs) -> Tensor:
        for name in ("x", "topk_idx", "topk_weights"):
            getattr(self.inputs, name).copy_(getattr(given, name))
        self.graph.replay()
        return self.y.clone()

    def check(self, given: LayerInputs, name: str) -> None:
        """A replay gives the bits of an eager call; once more, too."""
        with torch.no_grad():
            expected = given.call(backend=self.backend)
        assert_equal_bits(self.replay(given), expected, name)
        self.graph.replay()
        assert_equal_bits(self.y, expected, f"{name}, again")


def layer_of(tokens: int, seed: int = 0) -> LayerInputs:
    """Balanced routing; the same weights for every number of tokens."""
    weights = make_inputs(random_routing(1, EXPERTS, TOP_K), HIDDEN, WIDTH, EXPERTS, bias=True, seed=7)
    ids = (torch.arange(tokens * TOP_K).view(tokens, TOP_K) + seed) % EXPERTS
    tokenwise = make_inputs(ids, HIDDEN, WIDTH, EXPERTS, seed=seed)
    return on_device(replace(weights, x=tokenwise.x, topk_idx=ids, topk_weights=tokenwise.topk_weights))


def other_routings(inputs: LayerInputs) -> dict[str, LayerInputs]:
    """Name -> the layer with other ids, and with NaN in the rows of tokens that have no route."""
    tokens = inputs.x.shape[0]
    half = torch.where(torch.arange(TOP_K, device="cuda") < TOP_K // 2, inputs.topk_idx, -1)
    gone = (torch.arange(tokens, device="cuda") % 2 == 1)[:, None]
    ids = inputs.topk_idx.masked_fill(gone, -1)
    sick = replace(inputs, x=inputs.x.masked_fill(gone, torch.nan), topk_idx=ids)
    return {
        "all to one": replace(inputs, topk_idx=torch.full_like(inputs.topk_idx, 5)),
        "half dropped": replace(inputs, topk_idx=half.contiguous()),
        "NaN in dropped tokens": sick,
        "all dropped": replace(inputs, topk_idx=torch.full_like(inputs.topk_idx, -1)),
        "other tokens": layer_of(tokens, seed=3),
        "as captured": inputs,
    }


@pytest.mark.parametrize("tokens", [16, 300])
@both_backends
def test_a20_other_routing_than_captured(backend: str, tokens: int) -> None:
    inputs = layer_of(tokens)
    captured = Captured(inputs, backend)
    for name, given in other_routings(inputs).items():
        captured.check(given, name)
    sick = other_routings(inputs)["NaN in dropped tokens"]
    y = captured.replay(sick)
    assert not y[1::2].any()
    assert y[::2].isfinite().all()


@both_backends
def test_a20_several_graphs_replayed_in_turns(backend: str) -> None:
    graphs = {tokens: Captured(layer_of(tokens), backend) for tokens in (1, 2, 4, 8)}
    for turn in range(4):
        for tokens, captured in graphs.items() if turn % 2 else reversed(graphs.items()):
            captured.check(layer_of(tokens, seed=turn), f"N = {tokens}, turn {turn}")
            routings = list(other_routings(layer_of(tokens)).items())
            name, given = routings[(turn + tokens) % len(routings)]
            captured.check(given, f"N = {tokens}, turn {turn}, {name}")


@both_backends
def test_a20_replays_one_after_the_other(backend: str) -> None:
    """Without a host in between: launches of a graph follow each other on the stream."""
    inputs = layer_of(64)
    captured = Captured(inputs, backend)
    expected = captured.replay(inputs)
    for _ in range(100):
        captured.graph.replay()
    assert_equal_bits(captured.y, expected)


@both_backends
def test_a20_invalid_id_in_a_replay(backend: str) -> None:
    """NaN, and the error is raised by `check_errors`; the next replay is right."""
    inputs = layer_of(16)
    captured = Captured(inputs, backend)
    ids = inputs.topk_idx.clone()
    ids[9, 2] = EXPERTS
    assert captured.replay(replace(inputs, topk_idx=ids)).isnan().all()
    with pytest.raises(moe_megakernel.RoutingError, match=rf"got {EXPERTS} at topk_idx\[9, 2\]"):
        moe_megakernel.check_errors()
    captured.check(inputs, "after an invalid id")
