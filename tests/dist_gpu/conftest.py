"""Pools of processes that share the GPUs: one for each number of ranks, kept over all tests that use it.

pytest runs the tests of one `pool` together, because the fixture is of the session and parametrised; so no more than
one pool lives at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.dist_gpu import mps
from tests.distributed.pool import Pool
from tests.gpu.layers import missing_kernels

# Without it, torch may refuse cuBLAS under `use_deterministic_algorithms`; the processes inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
#: Seconds for a call; longer than ranks wait for each other, so that a rank tells what it has waited for.
LIMIT = 70.0


@pytest.fixture(scope="session")
def kernels() -> None:
    """Skips without a device that the fused kernels run on."""
    reason = missing_kernels()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session", params=[2, 4, 8])
def pool(kernels: None, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Processes for W ranks: 2, 4 and 8, or those of `parametrize("pool", [...], indirect=True)`."""
    ranks = Pool(request.param, device="cuda", limit=LIMIT)
    yield ranks
    ranks.close()


@pytest.fixture
def own_ranks(kernels: None) -> Iterator[Callable[..., Pool]]:
    """own_ranks(W, ...): fresh processes, for a test that kills or leaves them."""
    pools: list[Pool] = []

    def make(ranks: int, **options: Any) -> Pool:
        pools.append(Pool(ranks, device="cuda", limit=LIMIT, **options))
        return pools[-1]

    yield make
    for one in pools:
        one.close()


@pytest.fixture
def _no_mps() -> None:
    """Skips where a failing rank could disturb others through the MPS server that they share."""
    if mps.is_running():
        pytest.skip("needs ranks without MPS: `python -m tests.dist_gpu` runs it so")
