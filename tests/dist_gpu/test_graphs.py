"""Case A20 over several ranks: forward and backward in one CUDA graph on every rank; replays have the eager bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.dist_gpu.layers import Layer, Prepared, expect_refused, one_rank, reserve_for
from tests.distributed.pool import Pool
from tests.distributed.split import share_of
from tests.distributed.worker import Rank
from torch import Tensor

import moe_megakernel
from moe_megakernel import RoutingError
from moe_megakernel.testing import LayerInputs, assert_equal_bits

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

LAYER = Layer(150, 10, 3, 72, 40, routing={"zipf": 1.0, "drop": 0.1}, options={"bias": True})


class CapturedStep:
    """One rank's captured step. Replays read what `replay` copies to the places that the capture saw."""

    def __init__(self, rank: Rank, whole: LayerInputs, tokens: list[int], backend: str, recompute: bool) -> None:
        self.rank, self.share = rank, share_of(rank.rank, tokens, whole.num_experts)
        self.step, self.backend, self.recompute = Prepared(rank, whole, tokens), backend, recompute
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is allocated once is not part of a graph
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        moe_megakernel.check_errors()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self._run()

    def _run(self) -> list[Tensor]:
        return self.step.backward(self.step.forward(self.backend, recompute=self.recompute))

    def replay(self, whole: LayerInputs) -> None:
        given = self.share.inputs(whole)
        with torch.no_grad():
            for name in ("x", "topk_idx", "topk_weights"):
                getattr(self.step.leaves, name).copy_(getattr(given, name))
        self.graph.replay()

    def check(self, whole: LayerInputs, where: str) -> None:
        """A replay on this batch has the bits of one rank's eager step."""
        expected = self.share.results(one_rank(self.rank, whole))
        self.replay(whole)
        moe_megakernel.check_errors()
        for name, actual in zip(self.step.names, self.results, strict=True):
            assert_equal_bits(actual, expected[name], f"{name} on rank {self.rank.rank}, {where}")


def other_tokens(rank: Rank, whole: LayerInputs, seed: int) -> LayerInputs:
    """The same weights with another routing and other tokens, as many as before."""
    drawn = LAYER.batch(rank, seed)[0]
    return replace(whole, x=drawn.x, topk_idx=drawn.topk_idx, topk_weights=drawn.topk_weights)


def check_graphs(rank: Rank, backend: str) -> None:
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    eager = Prepared(rank, whole, tokens)
    for recompute in (False, True):
        captured = CapturedStep(rank, whole, tokens, backend, recompute)
        for turn in range(3):
            captured.check(other_tokens(rank, whole, turn), f"replay {turn}")
            eager.check(eager.backward(eager.forward(backend)), f"eager after replay {turn}")
        for _ in range(50):  # one after the other, without a host in between
            captured.graph.replay()
        captured.check(whole, "after many replays")


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_a20_replays_with_other_routings(pool: Pool, backend: str) -> None:
    pool.run(check_graphs, backend, world=True)


def check_bad_id(rank: Rank, backend: str) -> None:
    """NaN everywhere, and `check_errors` raises on every rank; the next replay is right."""
    whole, tokens = LAYER.batch(rank)
    reserve_for(rank, [(whole, tokens)])
    captured = CapturedStep(rank, whole, tokens, backend, False)
    broken = replace(whole, topk_idx=whole.topk_idx.clone())
    broken.topk_idx[tokens[0] + 1, 2] = LAYER.num_experts
    names = captured.step.names

    def replay() -> dict[str, Tensor | None]:
        captured.replay(broken)
        return dict(zip(names, captured.results, strict=True))

    expect_refused(RoutingError, r"at topk_idx\[1, 2\] on rank 1", replay)
    captured.check(whole, "after an invalid id")


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_a20_invalid_id_in_a_replay(pool: Pool, backend: str) -> None:
    pool.run(check_bad_id, backend, world=True)
