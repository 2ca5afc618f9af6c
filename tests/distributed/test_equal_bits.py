"""The result does not depend on the number of ranks: y and every gradient have the bits of one rank.

Inputs of every kind, in one batch over uneven ranks; `test_fuzz` draws them at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.distributed.split import all_rows, check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import ACTIVATION_CASES, ALL_DTYPES, make_dy, name_of, run_step
from torch import Tensor

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

pytestmark = pytest.mark.distributed

#: Tokens of each rank, by number of ranks.
SPLITS = {2: [[5, 18], [0, 23], [23, 0]], 4: [[3, 0, 9, 11], [0, 0, 23, 0], [6, 6, 6, 5]]}
EXPERTS, TOP_K = 6, 3


def mixed_routing(num_experts: int = EXPERTS, tokens: int = 23) -> Tensor:
    """Skewed routes with dropped ones, a token without any, and tokens that name an expert twice."""
    idx = random_routing(tokens, num_experts, TOP_K, zipf=1.0, drop=0.2)
    idx[1] = -1
    idx[2] = idx[7] = num_experts - 1
    return idx


def check_splits(rank: Rank, whole: LayerInputs, splits: list[list[int]], **step: Any) -> None:
    for tokens in splits:
        reserve_all(rank, tokens, TOP_K)
        with poisoned_memory():
            check_group(rank, whole, tokens, **step)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_dtypes(some_ranks, ranks, dtype):
    whole = make_inputs(mixed_routing(), 40, 24, EXPERTS, bias=True, dtype=dtype)
    some_ranks(ranks).run(check_splits, whole, SPLITS[ranks])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ACTIVATION_CASES, ids=name_of)
def test_activations(some_ranks, ranks, case):
    whole = make_inputs(mixed_routing(), 24, 20, EXPERTS, bias=True, dtype=torch.bfloat16, **case)
    some_ranks(ranks).run(check_splits, whole, SPLITS[ranks][:1])


@pytest.mark.parametrize(("ranks", "num_experts"), [(2, 1), (4, 3), (4, 1), (2, 7)])
def test_uneven_and_missing_experts(some_ranks, ranks, num_experts):
    """E is not divisible by W, or smaller: some ranks hold no expert."""
    whole = make_inputs(mixed_routing(num_experts), 40, 24, num_experts, bias=True, dtype=torch.float32)
    some_ranks(ranks).run(check_splits, whole, SPLITS[ranks])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("width", [(7, 5), (129, 65), (1, 1)], ids=str)
def test_odd_widths(some_ranks, ranks, width):
    whole = make_inputs(mixed_routing(), *width, EXPERTS, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_splits, whole, SPLITS[ranks][:1])


@pytest.mark.parametrize("ranks", [2, 4])
def test_more_tokens_than_classes(some_ranks, ranks):
    """More than 64 tokens, so that classes of the row order hold several."""
    tokens = {2: [70, 131], 4: [1, 65, 64, 71]}[ranks]
    whole = make_inputs(random_routing(201, EXPERTS, TOP_K, zipf=0.7, drop=0.1), 16, 8, EXPERTS, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_splits, whole, [tokens])


# -- layout, recomputation, masks, main gradients ---------------------------------------------------------------------


def _strided(leaves: LayerInputs, **options: Any) -> Tensor:
    """The op on views of its token tensors that are not contiguous."""
    x = torch.stack((leaves.x, -leaves.x), dim=2)[..., 0]
    weights = leaves.topk_weights.t().contiguous().t()
    idx = torch.stack((leaves.topk_idx, leaves.topk_idx))[0].t().contiguous().t()
    return replace(leaves, x=x, topk_weights=weights, topk_idx=idx).call(**options)


def check_layouts(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    reserve_all(rank, tokens, TOP_K)
    expected = run_step(whole)
    check_group(rank, whole, tokens, expected=expected, call=_strided)
    check_group(rank, whole, tokens, expected=expected, recompute=True)
    one = torch.ones((), dtype=whole.x.dtype).expand(whole.x.shape)
    check_group(rank, whole, tokens, dy=one)
    column = make_dy(whole.x)[:, :1].expand(whole.x.shape)
    check_group(rank, whole, tokens, dy=column)
    check_group(rank, whole, tokens, dy=make_dy(whole.x.t()).t())
    check_group(rank, replace(whole, topk_idx=whole.topk_idx.int()), tokens, expected=expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_strided_inputs_and_gradients_and_recompute(some_ranks, ranks):
    whole = make_inputs(mixed_routing(), 40, 24, EXPERTS, bias=True, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_layouts, whole, SPLITS[ranks][0])


def check_masks(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    reserve_all(rank, tokens, TOP_K)
    expected = run_step(whole)
    names = list(whole.grads())
    for mask in range(1, 2 ** len(names), 3):
        wants = {name: bool(mask >> i & 1) for i, name in enumerate(names)}
        asked = {name: g if name == "y" or wants[name] else None for name, g in expected.items()}
        check_group(rank, whole, tokens, expected=asked, requires_grad=wants, recompute=mask % 2 == 0)
    with torch.no_grad():
        y = share_of(rank.rank, tokens, EXPERTS).inputs(whole).call(group_name=rank.name)
    assert_equal_bits(y, share_of(rank.rank, tokens, EXPERTS).of("y", expected["y"]), "y")


@pytest.mark.parametrize("ranks", [2, 4])
def test_some_inputs_frozen(some_ranks, ranks):
    whole = make_inputs(mixed_routing(), 24, 16, EXPERTS, bias=True, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_masks, whole, SPLITS[ranks][0])


def check_main_grads(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    """float32 buffers that hold values already; rows of unused experts keep their bits."""
    reserve_all(rank, tokens, TOP_K)
    share = share_of(rank.rank, tokens, whole.num_experts)
    start = {n: torch.randn(getattr(whole, n).shape, generator=torch.Generator().manual_seed(3)) for n in _MAIN}
    for given in (("w_gate_up",), ("w_down",), _MAIN):
        one = {f"main_grad_{n[2:]}": start[n].clone() for n in given}
        many = {f"main_grad_{n[2:]}": share.of(n, start[n]).clone() for n in given}
        expected = run_step(whole, **one)
        wanted = share.results(expected)
        for _ in range(2):
            actual = group_step(rank, whole, tokens, **many)
            for name, tensor in actual.items():
                assert_equal_bits(tensor, wanted[name], name)
            for name, buffer in many.items():
                assert_equal_bits(buffer, share.of(name, one[name]), name)
            run_step(whole, **one)


_MAIN = ("w_gate_up", "w_down")


@pytest.mark.parametrize("ranks", [2, 4])
def test_main_grads(some_ranks, ranks):
    idx = mixed_routing()
    idx[idx == 2] = -1
    whole = make_inputs(idx, 24, 16, EXPERTS, bias=True, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_main_grads, whole, SPLITS[ranks][0])


def check_inputs_unchanged(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    reserve_all(rank, tokens, TOP_K)
    leaves = share_of(rank.rank, tokens, EXPERTS).inputs(whole).leaves()
    before = {n: t.detach().clone() for n in whole.grads() if (t := getattr(leaves, n)) is not None}
    y = leaves.call(group_name=rank.name, row_capacity=all_rows(tokens, TOP_K))
    kept = y.detach().clone()
    y.backward(make_dy(y))
    for name, tensor in before.items():
        assert_equal_bits(getattr(leaves, name), tensor, name)
        assert getattr(leaves, name).data_ptr() != y.data_ptr() or not y.numel()
    assert_equal_bits(y, kept, "y")


def test_inputs_and_outputs_are_left_alone(some_ranks):
    whole = make_inputs(mixed_routing(), 24, 16, EXPERTS, dtype=torch.bfloat16)
    some_ranks(2).run(check_inputs_unchanged, whole, [5, 18])
