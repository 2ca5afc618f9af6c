"""Row order: `moe::merge_rows` and its twin in PyTorch against one global comparison sort, for any split over ranks.

The oracle knows nothing of classes: it sorts all routes of the global batch by (expert, g mod 64, g div 64, k).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.cases import KINDS, count_classes, expert_begin, random_ids

from moe_megakernel.distributed.exchange import plan_rows, plan_rows_in_torch
from moe_megakernel.plan import PlanConfig, Problem, make_plan


def global_rows(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """[R, 3] expert, global token, slot of every valid route of ids [sum T, K], in row order."""
    g, k = np.divmod(np.arange(ids.size), ids.shape[1])
    expert = ids.reshape(-1)
    by_key = np.lexsort((k, g // 64, g % 64, expert))
    by_key = by_key[expert[by_key] >= 0]
    return np.stack([expert[by_key], g[by_key], k[by_key]], axis=1)


def local_order(ids: np.ndarray) -> np.ndarray:
    """Route numbers of one rank by (expert, t mod 64, t div 64, k)."""
    t, k = np.divmod(np.arange(ids.size), ids.shape[1])
    expert = ids.reshape(-1)
    by_key = np.lexsort((k, t // 64, t % 64, expert))
    return by_key[expert[by_key] >= 0]


def check_split(ids: np.ndarray, tokens: np.ndarray, num_experts: int) -> None:
    """Every rank of a split gets its experts' rows of the global order, from the right places."""
    ranks, top_k = len(tokens), ids.shape[1]
    starts = np.cumsum(tokens) - tokens
    parts = [ids[s : s + t] for s, t in zip(starts, tokens, strict=True)]
    orders = [local_order(part) for part in parts]
    counts = torch.from_numpy(np.stack([count_classes(part, num_experts) for part in parts]))
    expected = global_rows(ids, num_experts)
    bounds = [expert_begin(num_experts, ranks, r) for r in range(ranks + 1)]
    # sent[a, b]: rows from rank a to rank b
    sent = np.array([[counts[a, bounds[b] : bounds[b + 1]].sum().item() for b in range(ranks)] for a in range(ranks)])
    for rank in range(ranks):
        offsets, sources, send, receive = torch.ops.moe.merge_rows(counts, torch.from_numpy(starts), rank)
        mine = expected[(expected[:, 0] >= bounds[rank]) & (expected[:, 0] < bounds[rank + 1])]
        assert (offsets.dtype, sources.dtype, send.dtype, receive.dtype) == (
            *(torch.int64, torch.int32),
            *(torch.int64, torch.int64),
        )
        assert sources.shape == (len(mine), 2)
        home, position = sources.numpy().T
        np.testing.assert_array_equal(home, np.searchsorted(starts + tokens, mine[:, 1], side="right"))
        routes = np.array([orders[h][p] for h, p in zip(home, position, strict=True)], dtype=np.int64)
        np.testing.assert_array_equal(routes, (mine[:, 1] - starts[home]) * top_k + mine[:, 2])
        per_expert = np.bincount(mine[:, 0] - bounds[rank], minlength=bounds[rank + 1] - bounds[rank])
        np.testing.assert_array_equal(offsets.numpy(), np.concatenate([[0], np.cumsum(per_expert)]))
        np.testing.assert_array_equal(send.numpy(), sent[rank])
        np.testing.assert_array_equal(receive.numpy(), sent[:, rank])
        check_plan_rows(counts, starts.tolist(), rank, home, position, sent[:, rank])


def check_plan_rows(
    counts: torch.Tensor, starts: list[int], rank: int, home: np.ndarray, position: np.ndarray, receive: np.ndarray
) -> None:
    """Both implementations of the exchange's plan say the same, and each row's place in the receive buffer is right."""
    ours, twin = plan_rows(counts, starts, rank), plan_rows_in_torch(counts, starts, rank)
    assert (ours.send, ours.receive) == (twin.send, twin.receive)
    for name in ("expert_offsets", "row_order"):
        left, right = getattr(ours, name), getattr(twin, name)
        assert left.dtype == right.dtype == torch.int32
        assert torch.equal(left, right)
    # The buffer holds rank after rank, and of each rank its route order from its first route to here on.
    arrived = [(r, p) for r in range(len(receive)) for p in sorted(position[home == r])]
    assert [arrived[i] for i in ours.row_order.tolist()] == list(zip(home.tolist(), position.tolist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 8), kind=st.sampled_from(KINDS), num_experts=st.integers(1, 40)
)
def test_rows_of_any_split(seed: int, ranks: int, kind: str, num_experts: int) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 120, ranks) * (random.random(ranks) < 0.8)
    ids = random_ids(random, kind, int(tokens.sum()), int(random.integers(1, 5)), num_experts)
    check_split(ids, tokens.astype(np.int64), num_experts)


@pytest.mark.parametrize(
    ("tokens", "num_experts"),
    [((700, 0, 1, 63, 64, 65, 3, 128), 2048), ((0, 0, 0), 5), ((300, 300), 1), ((5, 7, 9, 11), 3), ((200,), 12)],
    ids=["E 2048", "no tokens", "E 1", "E < W", "one rank"],
)
def test_rows_at_the_edges(tokens: tuple[int, ...], num_experts: int) -> None:
    random = np.random.default_rng(1)
    for kind in KINDS:
        check_split(random_ids(random, kind, sum(tokens), 3, num_experts), np.array(tokens), num_experts)


def test_plan_tables_have_the_offsets_of_merge_rows() -> None:
    random = np.random.default_rng(2)
    tokens = np.array([50, 0, 77, 31])
    counts = torch.from_numpy(np.stack([count_classes(random_ids(random, "zipf", t, 2, 10), 10) for t in tokens]))
    for rank in range(4):
        config = PlanConfig(Problem(4, rank, 10, 2, 64, 128, True, 77, 400))
        expected = torch.ops.moe.merge_rows(counts, torch.from_numpy(np.cumsum(tokens) - tokens), rank)[0]
        assert torch.equal(make_plan(config, counts, torch.from_numpy(tokens)).expert_offsets, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3, 64), torch.zeros(2).long(), 0), r"class_counts: expected a contiguous int32 .* got 3"),
        ((torch.zeros(2, 3, 63).int(), torch.zeros(2).long(), 0), r"class_counts: expected a contiguous int32"),
        ((torch.zeros(2, 64).int(), torch.zeros(2).long(), 0), r"class_counts: expected .*\[W, E, 64\], got 2 dim"),
        ((torch.zeros(2, 3, 64).int().transpose(0, 1), torch.zeros(3).long(), 0), "class_counts: expected a contig"),
        ((torch.full((2, 3, 64), -1).int(), torch.zeros(2).long(), 0), "class_counts: expected no negative count, got"),
        ((torch.full((1, 3, 64), 2**30).int(), torch.zeros(1).long(), 0), r"class_counts: expected at most \d+ routes"),
        ((torch.zeros(2, 3, 64).int(), torch.zeros(3).long(), 0), r"token_starts: expected .* of 2 element.*got 1 dim"),
        ((torch.zeros(2, 3, 64).int(), torch.zeros(2).int(), 0), "token_starts: expected a contiguous int64"),
        ((torch.zeros(2, 3, 64).int(), torch.tensor([4, 3]), 0), "token_starts: expected ascending .* 3 for rank 1"),
        ((torch.zeros(2, 3, 64).int(), torch.tensor([-1, 3]), 0), "token_starts: expected ascending .* -1 for rank 0"),
        ((torch.zeros(2, 3, 64).int(), torch.zeros(2).long(), 2), "rank: expected 0 to 1, got 2"),
        ((torch.zeros(2, 3, 64).int(), torch.zeros(2).long(), -1), "rank: expected 0 to 1, got -1"),
    ],
)
def test_merge_rows_refuses(arguments: tuple[torch.Tensor, torch.Tensor, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"moe::merge_rows: {message}"):
        torch.ops.moe.merge_rows(*arguments)


def test_merge_rows_fake() -> None:
    counts, starts = torch.randint(0, 3, (3, 7, 64)).int(), torch.tensor([0, 500, 900])
    for rank in range(3):
        torch.library.opcheck(torch.ops.moe.merge_rows, (counts, starts, rank), test_utils=("test_schema",))
        torch.library.opcheck(torch.ops.moe.merge_rows, (counts, starts, rank), test_utils=("test_faketensor",))
