"""Expert parallelism by all-to-all and grouped_mm, over gloo: the numbers of one rank, also on ranks without rows."""

from __future__ import annotations

import pytest
from tests.distributed.pool import Pool
from tests.distributed.worker import Rank

from moe_megakernel.bench import expected, modes
from moe_megakernel.bench.peers import IMPLEMENTATIONS
from moe_megakernel.bench.problem import make_problem, share_of
from moe_megakernel.bench.routings import Routing
from moe_megakernel.shapes import Shape

pytestmark = pytest.mark.distributed


def check(rank: Rank, kind: str, experts: int, tokens: int) -> float:
    """The worst error of both ways to combine, and of the layer itself."""
    shape = Shape("small", "small", num_experts=experts, hidden=64, width=32, top_k=2, tokens=tokens)
    whole = make_problem(shape, Routing(kind), device="cpu")
    want = expected.make_expected(whole, rank.rank, rank.ranks)
    problem = share_of(whole, rank.rank, rank.ranks, rank.group)
    assert IMPLEMENTATIONS["torch_staged"].absent(problem) == "has no ranks"
    worst = 0.0
    for name in ("nccl", "reference"):
        implementation = IMPLEMENTATIONS[name]
        assert implementation.absent(problem) == ""
        for variant in implementation.variants or ("",):
            found = modes.results(implementation.bind(problem, variant), problem.dy, "eager")
            worst = max(worst, *expected.check_numbers(want, found).values())
    return worst


@pytest.fixture(scope="module")
def pool() -> Pool:
    made = Pool(3)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "experts", "tokens"), [("uniform", 8, 50), ("zipf", 7, 31), ("one-hot", 8, 20), ("uniform", 2, 5)]
)
def test_numbers_of_one_rank(pool: Pool, kind: str, experts: int, tokens: int) -> None:
    errors = pool.run(check, kind, experts, tokens)
    assert max(errors) < 2e-2
