"""Case A17 over several ranks: `torch.compile(fullgraph=True)` of a training step has the bits of one rank."""

from __future__ import annotations

import pytest
import torch
from tests.dist_gpu.layers import check_bits, one_rank, way
from tests.distributed.pool import Pool
from tests.distributed.split import reserve_all
from tests.distributed.test_compile import TOP_K, compiled, eager, make, once
from tests.distributed.worker import Rank

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


def check_numbers(rank: Rank, compiler: str, dynamic: bool, splits: list[list[int]]) -> None:
    """Forward and backward, with h kept and computed again; a rank without tokens is a graph of its own."""
    reserve_all(rank, [max(max(s) for s in splits)] * rank.ranks, TOP_K)
    for backend in way(rank).backends:
        call = compiled(once, rank.name, compiler, dynamic)
        for seed, tokens in enumerate(splits):
            whole = make(sum(tokens), seed).to(torch.bfloat16, rank.device)
            expected = one_rank(rank, whole, call=eager(once))
            for recompute in (False, True):
                check_bits(rank, whole, tokens, backend, call=call, expected=expected, recompute=recompute)


@pytest.mark.parametrize("pool", [2], indirect=True)
@pytest.mark.parametrize(
    ("compiler", "dynamic", "splits"),
    [
        ("inductor", False, [[5, 8]]),
        ("aot_eager", True, [[5, 8], [0, 9], [70, 33]]),
    ],
)
def test_a17_training_step(pool: Pool, compiler: str, dynamic: bool, splits: list[list[int]]) -> None:
    pool.run(check_numbers, compiler, dynamic, splits, limit=200.0)
