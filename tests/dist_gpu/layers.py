"""Layers and checks of this folder: a global batch over the ranks, and one rank's results with the same kernels.

The checks take what runs them from the rank's device: on CUDA the transport `peer` with both kernel backends, on the
CPU the collective transport with the reference, so that the checks themselves are tried without a GPU
(`test_harness.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from tests.distributed.split import check_group, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.gpu.layers import no_host_sync
from tests.steps import Results, make_dy, run_step
from torch import Tensor

import moe_megakernel
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

#: The most ranks that a test of this folder starts.
MOST_RANKS = 8


class Way(NamedTuple):
    """How layers run on a device: over several ranks, and alone for the expected values."""

    transport: str
    backends: tuple[str, ...]
    one_rank: str


WAYS = {"cuda": Way("peer", ("mega", "staged"), "mega"), "cpu": Way("collective", ("reference",), "reference")}


def way(rank: Rank) -> Way:
    return WAYS[rank.device.type]


# -- batches ----------------------------------------------------------------------------------------------------------


def even(tokens: int, ranks: int) -> list[int]:
    return [tokens * (r + 1) // ranks - tokens * r // ranks for r in range(ranks)]


def steep(tokens: int, ranks: int) -> list[int]:
    """Every rank twice as many as the one before it."""
    some = [(tokens << r) // ((1 << ranks) - 1) for r in range(ranks - 1)]
    return [*some, tokens - sum(some)]


def gaps(tokens: int, ranks: int) -> list[int]:
    """None on every other rank, from the first on."""
    return [n for some in even(tokens, ranks // 2) for n in (0, some)]


def all_on_one(tokens: int, ranks: int) -> list[int]:
    return [0] * (ranks - 1) + [tokens]


@dataclass(frozen=True)
class Layer:
    """A layer and the shape of its batch, for any number of ranks.

    Args:
        tokens: of all ranks together.
        split: (tokens, ranks) -> tokens of each rank.
        routing: Zipf exponent and share of dropped routes, as in `random_routing`.
        routes: changes the drawn ids in place, given the experts of the last rank.
        options: of `make_inputs`.
    """

    tokens: int
    num_experts: int
    top_k: int
    hidden: int = 64
    width: int = 40
    split: Callable[[int, int], list[int]] = steep
    routing: dict[str, float] = field(default_factory=dict)
    routes: Callable[[Tensor, range], object] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self, rank: Rank, seed: int = 0) -> tuple[LayerInputs, list[int]]:
        """Arguments of all ranks together, on this rank's device, and the tokens of each rank."""
        idx = random_routing(self.tokens, self.num_experts, self.top_k, seed=seed, **self.routing)
        if self.routes is not None:
            self.routes(idx, moe_megakernel.expert_range(self.num_experts, rank.ranks - 1, rank.ranks))
        whole = make_inputs(idx, self.hidden, self.width, self.num_experts, seed=seed, **self.options)
        return whole.to(torch.bfloat16, rank.device), self.split(self.tokens, rank.ranks)


# -- steps ------------------------------------------------------------------------------------------------------------


def one_rank(rank: Rank, whole: LayerInputs, **step: Any) -> Results:
    """y and gradients of the whole batch, by one rank's kernels."""
    return run_step(whole, backend=way(rank).one_rank, **step)


def check_bits(rank: Rank, whole: LayerInputs, tokens: Sequence[int], backend: str = "", **step: Any) -> None:
    """A step on the group must give this rank its part of one rank's results, to the bit."""
    step.setdefault("expected", one_rank(rank, whole))
    step["backend"] = backend or way(rank).backends[0]
    check_group(rank, whole, tokens, transport=way(rank).transport, **step)


def forward(rank: Rank, inputs: LayerInputs, backend: str = "", **options: Any) -> Tensor:
    """y of this rank's part of a batch."""
    options.setdefault("backend", backend or way(rank).backends[0])
    return inputs.call(group_name=rank.name, transport=way(rank).transport, **options)


def forward_of(rank: Rank, whole: LayerInputs, tokens: Sequence[int], **options: Any) -> Results:
    """y alone of this rank's part of the whole batch, whose leaves want gradients."""
    leaves = share_of(rank.rank, tokens, whole.num_experts).inputs(whole).leaves()
    return {"y": forward(rank, leaves, **options)}


class Prepared:
    """One rank's part of a step, ready to run without any copy: leaves, gradient of y, and the expected results."""

    def __init__(self, rank: Rank, whole: LayerInputs, tokens: Sequence[int]) -> None:
        share = share_of(rank.rank, tokens, whole.num_experts)
        self.rank, self.leaves = rank, share.inputs(whole).leaves()
        self.dy = make_dy(whole.x)[share.tokens]
        expected = {name: t for name, t in share.results(one_rank(rank, whole)).items() if t is not None}
        self.names, self.expected = list(expected), list(expected.values())

    def forward(self, backend: str = "", **options: Any) -> Tensor:
        return forward(self.rank, self.leaves, backend, **options)

    def backward(self, y: Tensor) -> list[Tensor]:
        """y and the gradients, in the order of `names`."""
        return [y.detach(), *torch.autograd.grad(y, [getattr(self.leaves, n) for n in self.names[1:]], self.dy)]

    def check(self, results: Sequence[Tensor], where: str = "") -> None:
        for name, actual, expected in zip(self.names, results, self.expected, strict=True):
            assert_equal_bits(actual, expected, f"{name} on rank {self.rank.rank} {where}")


def reserve_for(rank: Rank, batches: Sequence[tuple[LayerInputs, list[int]]]) -> None:
    """Agrees on capacities that none of these batches can overflow."""
    for whole, tokens in batches:
        reserve_all(rank, tokens, whole.topk_idx.shape[1])


def expect_refused(kind: type[Exception], match: str, step: Callable[[], Results]) -> str:
    """`step` must fail with such an error: at once, or with NaN in every result and the error at the next check.

    Returns:
        The error's text.
    """

    def step_and_check() -> None:
        for name, tensor in step().items():
            assert tensor is None or bool(tensor.isnan().all()), f"{name}: expected NaN in a refused step"
        moe_megakernel.check_errors()

    with pytest.raises(kind, match=match) as caught:
        step_and_check()
    return str(caught.value)


def without_host_sync(rank: Rank) -> AbstractContextManager[None]:
    """On CUDA, any wait of the host for the device raises."""
    return no_host_sync() if rank.device.type == "cuda" else contextlib.nullcontext()


def delay(rank: Rank, cycles: int) -> None:
    """Keeps the current stream busy; nothing on the CPU."""
    if rank.device.type == "cuda":
        torch.cuda._sleep(cycles)
