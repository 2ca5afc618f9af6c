"""Ranks for the tests of this folder: pools of two and four processes for the session, and pools of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def some_ranks(request: pytest.FixtureRequest) -> Callable[[int], Pool]:
    """some_ranks(W): the session's pool of W ranks."""
    return lambda ranks: request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])


@pytest.fixture
def own_ranks() -> Iterator[Callable[..., Pool]]:
    """own_ranks(W, ...): fresh processes, for a test that kills or leaves them."""
    pools: list[Pool] = []

    def make(*args: Any, **options: Any) -> Pool:
        pools.append(Pool(*args, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
