"""``moe::route``, the first stage: the C++ kernel, and its twin in PyTorch, against a numpy sort by the same key.

Every output is allocated poisoned, so an element that the kernel leaves unwritten shows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_megakernel import _native
from moe_megakernel.reference.route import route as route_torch

RESIDUES = 64
DTYPES = [torch.int32, torch.int64]
LAYOUTS = ["contiguous", "transposed", "sliced", "one row", "one column"]
KINDS = ["uniform", "zipf", "one expert", "distinct", "few experts"]


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    """Let ``torch.empty`` return the largest integer everywhere."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def oracle(ids: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return route_order, class_counts and first_bad for ids [T, K] of any integer dtype, by a comparison sort."""
    num_tokens, top_k = ids.shape
    route = np.arange(num_tokens * top_k)
    token, slot, expert = route // max(top_k, 1), route % max(top_k, 1), ids.reshape(-1).astype(np.int64)
    valid = (expert >= 0) & (expert < num_experts)
    by_key = np.lexsort((slot, token // RESIDUES, token % RESIDUES, expert))
    order = np.full(route.size, -1)
    order[: valid.sum()] = by_key[valid[by_key]]
    counts = np.zeros((num_experts, RESIDUES), dtype=np.int64)
    np.add.at(counts, (expert[valid], token[valid] % RESIDUES), 1)
    bad = np.flatnonzero(~valid & (expert != -1))
    return order, counts, int(bad[0]) if bad.size else -1


def check(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Compare both implementations with the oracle: values, dtypes and shapes."""
    expected_order, expected_counts, expected_bad = oracle(topk_idx.numpy(), num_experts)
    for implementation in (torch.ops.moe.route, route_torch):
        order, counts, first_bad = implementation(topk_idx, num_experts)
        assert (order.dtype, counts.dtype, first_bad.dtype) == (torch.int32, torch.int32, torch.int64)
        assert first_bad.shape == (1,)
        np.testing.assert_array_equal(order.numpy(), expected_order)
        np.testing.assert_array_equal(counts.numpy(), expected_counts)
        assert first_bad.item() == expected_bad


def make_ids(rng: np.random.Generator, kind: str, num_tokens: int, top_k: int, num_experts: int) -> np.ndarray:
    """Draw expert ids int64 [T, K] of the named kind; all but "distinct" may repeat an id within a token."""
    shape = (num_tokens, top_k)
    if kind == "zipf":
        return (rng.zipf(1.3, shape) - 1) % num_experts
    if kind == "one expert":
        return np.full(shape, rng.integers(num_experts))
    if kind == "few experts":
        return rng.choice(rng.integers(num_experts, size=2), shape)
    if kind == "distinct" and top_k <= num_experts:
        return rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)[:, :top_k]
    return rng.integers(num_experts, size=shape)


def lay_out(ids: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same ids [T, K] with other strides; the two expanded layouts repeat the first row or column."""
    num_tokens, top_k = ids.shape
    if layout == "transposed":
        return ids.t().contiguous().t()
    if layout == "sliced":
        wide = torch.full((2 * num_tokens, top_k + 2), 1 << 20, dtype=ids.dtype)
        wide[::2, 1 : top_k + 1] = ids
        return wide[::2, 1 : top_k + 1]
    if layout == "one row" and num_tokens:
        return ids[:1].expand(num_tokens, top_k)
    if layout == "one column":
        return ids[:, :1].expand(num_tokens, top_k)
    return ids


def test_the_native_library_is_what_runs() -> None:
    assert _native.load(), _native.why_missing()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(0, 200),
    top_k=st.integers(1, 9),
    num_experts=st.one_of(st.integers(1, 16), st.sampled_from([64, 128, 384, 2048])),
    dropped=st.sampled_from([0.0, 0.2, 1.0]),
    bad=st.sampled_from([0.0, 0.05]),
)
def test_any_routing_matches_the_oracle(
    seed: int,
    kind: str,
    layout: str,
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dropped: float,
    bad: float,
) -> None:
    rng = np.random.default_rng(seed)
    ids = make_ids(rng, kind, num_tokens, top_k, num_experts)
    ids = np.where(rng.random(ids.shape) < dropped, -1, ids)
    limits = np.iinfo(np.int32 if dtype == torch.int32 else np.int64)
    wrong = rng.choice([num_experts, num_experts + 1, -2, limits.min, limits.max], ids.shape)
    ids = np.where(rng.random(ids.shape) < bad, wrong, ids)
    check(lay_out(torch.from_numpy(ids).to(dtype), layout), num_experts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 8])
def test_no_tokens(dtype: torch.dtype, top_k: int) -> None:
    check(torch.empty(0, top_k, dtype=dtype), 5)


def test_key_order_is_expert_then_residue_then_age_then_slot() -> None:
    topk_idx = torch.full((130, 2), -1)
    topk_idx[0] = torch.tensor([1, 1])  # routes 0 and 1
    topk_idx[1, 0] = 1  # route 2, residue 1
    topk_idx[64, 1] = 1  # route 129, residue 0
    topk_idx[128, 0] = 1  # route 256, residue 0
    topk_idx[129, 1] = 0  # route 259, the lower expert
    order, counts, _ = torch.ops.moe.route(topk_idx, 2)
    assert order[:6].tolist() == [259, 0, 1, 129, 256, 2]
    assert (order[6:] == -1).all()
    assert counts[1, :2].tolist() == [4, 1]
    assert counts[0, 1].item() == 1
    assert counts.sum().item() == 6


@pytest.mark.parametrize("num_experts", [1, 2048])
def test_one_expert_takes_all(num_experts: int) -> None:
    check(torch.full((512, 2), num_experts - 1), num_experts)


@pytest.mark.parametrize("bad_id", [4, -2, 2**31 - 1, -(2**31), 2**32 + 1, 2**32 - 1, -(2**32), 2**63 - 1, -(2**63)])
def test_a_bad_id_is_reported_by_position_and_skipped(bad_id: int) -> None:
    """2^32 + 1 would be expert 1, and 2^32 - 1 a dropped route, if ids were cut to 32 bits before the test."""
    topk_idx = torch.tensor([[0, 1], [2, bad_id], [bad_id, 3]])
    order, counts, first_bad = torch.ops.moe.route(topk_idx, 4)
    assert first_bad.tolist() == [3]
    assert order.tolist() == [0, 1, 2, 5, -1, -1]
    assert counts.sum(1).tolist() == [1, 1, 1, 1]
    check(topk_idx, 4)


@pytest.mark.parametrize("bad_id", [4, -2, 2**31 - 1, -(2**31)])
def test_a_bad_int32_id_is_reported(bad_id: int) -> None:
    topk_idx = torch.tensor([[0, 1], [2, bad_id]], dtype=torch.int32)
    assert torch.ops.moe.route(topk_idx, 4)[2].tolist() == [3]
    check(topk_idx, 4)


def test_the_input_is_left_alone() -> None:
    topk_idx = torch.tensor([[3, -1], [9, 0]])
    before = topk_idx.clone()
    torch.ops.moe.route(topk_idx, 4)
    assert torch.equal(topk_idx, before)


@pytest.mark.parametrize(("num_tokens", "top_k"), [(2**31, 1), (2**28, 8), (2**59, 8)])
def test_more_routes_than_int32_can_number_are_refused(num_tokens: int, top_k: int) -> None:
    topk_idx = torch.zeros(1, top_k, dtype=torch.int64).expand(num_tokens, top_k)
    message = rf"moe::route: topk_idx: expected T \* K <= 2147483647 routes, got T = {num_tokens}, K = {top_k}"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moe.route(topk_idx, 4)


@pytest.mark.parametrize("num_experts", [0, -1, 2**25, 2**62])
def test_a_number_of_experts_out_of_range_is_refused(num_experts: int) -> None:
    with pytest.raises(RuntimeError, match=rf"moe::route: num_experts: expected 1 to 33554431, got {num_experts}"):
        torch.ops.moe.route(torch.zeros(2, 2, dtype=torch.int64), num_experts)


@pytest.mark.parametrize(
    ("topk_idx", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), r"expected shape \[T, K\], got 1 dimension"),
        (torch.zeros(4, 0, dtype=torch.int64), r"expected shape \[T, K\] with K >= 1, got \[4, 0\]"),
        (torch.zeros(4, 2), "expected dtype int32 or int64, got Float"),
        (torch.zeros(4, 2, dtype=torch.uint8), "expected dtype int32 or int64, got Byte"),
    ],
)
def test_a_tensor_of_the_wrong_kind_is_refused(topk_idx: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match="moe::route: topk_idx: " + message):
        torch.ops.moe.route(topk_idx, 4)
