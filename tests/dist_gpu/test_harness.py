"""The checks of this folder on the CPU, over the collective transport: they pass where bits agree, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.dist_gpu.layers import Layer, check_bits, expect_refused, one_rank, reserve_for
from tests.dist_gpu.test_equal_bits import LAYERS, check_layer, check_many_steps
from tests.dist_gpu.test_errors import check_bad_id, same_on_all
from tests.distributed.pool import Pool
from tests.distributed.split import group_step
from tests.distributed.worker import Rank

from moe_megakernel import RoutingError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def test_checks_pass_where_bits_agree(two_ranks: Pool) -> None:
    two_ranks.run(check_layer, LAYERS["duplicates and dropped"], world=True)
    two_ranks.run(check_many_steps, "reference", 20, world=True)
    same_on_all(two_ranks.run(check_bad_id, "reference", 77, world=True))


def check_they_fail(rank: Rank) -> None:
    """One other bit in the expected values of one rank; another message; no error at all."""
    whole, tokens = Layer(20, 4, 2, options={"bias": True}).batch(rank)
    reserve_for(rank, [(whole, tokens)])
    for name in one_rank(rank, whole):
        expected = one_rank(rank, whole)
        expected[name].view(-1)[-1] += 1  # the last token or expert: rank 1's
        if rank.rank == 1:
            with pytest.raises(AssertionError, match=f"{name} on rank 1: expected equal bits"):
                check_bits(rank, whole, tokens, expected=expected)
        else:
            check_bits(rank, whole, tokens, expected=expected)
    broken = replace(whole, topk_idx=whole.topk_idx.clone())
    broken.topk_idx[0, 0] = 4
    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        expect_refused(RoutingError, "got 5", lambda: group_step(rank, broken, tokens))
    with pytest.raises(AssertionError, match="expected NaN in a refused step"):
        expect_refused(RoutingError, "got 4", lambda: group_step(rank, whole, tokens))


def test_checks_fail_where_they_must(two_ranks: Pool) -> None:
    two_ranks.run(check_they_fail)


def test_a_failing_rank_is_replaced(two_ranks: Pool) -> None:
    with pytest.raises(AssertionError, match=r"ranks .* failed"):
        two_ranks.run(check_layer, None, world=True)
    two_ranks.run(check_layer, LAYERS["one token"], world=True)
