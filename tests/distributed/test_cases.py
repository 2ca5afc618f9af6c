"""Cases that break expert-parallel libraries, by the ids of the collection they come from (A03 ...).

Those about time, death and mismatch stand in `test_late_and_dead_ranks` (A25), those about compilation in
`test_compile`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.distributed.split import all_rows, check_group, group_step, share_of
from tests.distributed.worker import Rank
from tests.steps import expected_step, make_dy, run_step
from torch.utils.checkpoint import checkpoint

import moe_megakernel
from moe_megakernel.testing import LayerInputs, assert_close, assert_equal_bits, make_inputs, random_routing

pytestmark = pytest.mark.distributed

S = {"hidden": 64, "expert_width": 32, "num_experts": 4}


# -- A03: every token to one rank -------------------------------------------------------------------------------------


def check_a03(rank: Rank, whole: LayerInputs, rows: int) -> None:
    """`rows` is what is agreed at first; -1 for the default."""
    top_k = whole.topk_idx.shape[1]
    tokens = [len(whole.topk_idx) // rank.ranks] * rank.ranks
    moe_megakernel.reserve(rank.group, tokens[0], top_k, rows)
    rows = 2 * tokens[0] * top_k if rows < 0 else rows
    needed = rf"row_capacity: expected at most {rows} rows on a rank, got {whole.topk_idx.numel()} needed on rank 0"
    for _ in range(2):
        with pytest.raises(moe_megakernel.CapacityError, match=needed):
            group_step(rank, whole, tokens)
    check_group(rank, replace(whole, topk_idx=balanced_routing(whole)), tokens)
    with pytest.raises(moe_megakernel.CapacityError, match=f"row_capacity: expected at most the {rows} rows agreed"):
        group_step(rank, whole, tokens, row_capacity=rows + 1)
    enough = all_rows(tokens, top_k)
    assert moe_megakernel.reserve(rank.group, tokens[0], top_k, enough) == (tokens[0], enough)
    check_group(rank, whole, tokens)
    check_group(rank, whole, tokens, row_capacity=enough)


def balanced_routing(whole: LayerInputs) -> torch.Tensor:
    tokens, top_k = whole.topk_idx.shape
    return (torch.arange(tokens)[:, None] + torch.arange(top_k)) % whole.num_experts


@pytest.mark.parametrize(("ranks", "ids", "rows"), [(2, (0,), 40), (4, (1, 0), -1), (4, (1, 1), -1)])
def test_a03_every_token_to_one_rank(some_ranks, ranks, ids, rows):
    """Exact with a capacity that fits; else the same error on every rank, nothing lost, and the next call works."""
    idx = torch.tensor([ids]).repeat(64, 1)
    whole = make_inputs(idx, 32, 16, 8, dtype=torch.bfloat16)
    some_ranks(ranks).run(check_a03, whole, rows)


# -- A05, A22: token counts that differ and change --------------------------------------------------------------------


def check_sequence(rank: Rank, batches: list[tuple[LayerInputs, list[int]]]) -> None:
    """Steps in one group whose capacity is agreed once."""
    largest, top_k = max(max(tokens) for _, tokens in batches), batches[0][0].topk_idx.shape[1]
    moe_megakernel.reserve(rank.group, largest, top_k, rank.ranks * largest * top_k)
    for whole, tokens in batches:
        check_group(rank, whole, tokens)


def batch(tokens: list[int], seed: int, dtype: torch.dtype = torch.float32) -> tuple[LayerInputs, list[int]]:
    return make_inputs(random_routing(sum(tokens), 4, 2, seed=seed), **S, dtype=dtype, seed=seed), tokens


def test_a05_a_rank_without_tokens(some_ranks):
    first = [[0, 8], [8, 0], [0, 0]]
    steps = [[0, 8] if step % 2 else [8, 0] for step in range(10)]
    some_ranks(2).run(check_sequence, [batch(tokens, seed) for seed, tokens in enumerate(first + steps)])


def check_a05_at_first_use(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    check_group(rank, whole, tokens)


@pytest.mark.parametrize("tokens", [[0, 8], [8, 0], [0, 0]], ids=str)
def test_a05_a_rank_without_tokens_at_first_use(some_ranks, tokens):
    """The capacity is agreed by the call itself; that of an empty batch is 0."""
    some_ranks(2).run(check_a05_at_first_use, *batch(tokens, 0))


@pytest.mark.parametrize(
    ("ranks", "sequence"), [(2, [[5, 6], [1, 64], [7, 256]]), (4, [[1, 2, 3, 5], [5, 3, 2, 1], [1, 2, 3, 5]])]
)
def test_a22_token_counts_that_change_every_step(some_ranks, ranks, sequence):
    some_ranks(ranks).run(check_sequence, [batch(tokens, seed, torch.bfloat16) for seed, tokens in enumerate(sequence)])


# -- A13: combine sums above bfloat16 ---------------------------------------------------------------------------------


def check_a13(rank: Rank) -> None:
    """o = 1, 2**-9, -1 from experts on different ranks: a running sum in bfloat16 would give 0."""
    whole = make_inputs(torch.tensor([[0, 1, 2], [2, 1, 0], [1, 0, 2]]), 4, 4, 3, activation="relu2")
    values = torch.tensor([1.0, 2.0**-9, -1.0], dtype=torch.float64)
    whole = replace(
        whole,
        x=torch.ones(3, 4).double(),
        topk_weights=torch.ones(3, 3).double(),
        w_gate_up=torch.eye(4).double().expand(3, 4, 4).contiguous(),
        w_down=values[:, None, None] * torch.eye(4).double(),
    ).to(torch.bfloat16)
    moe_megakernel.reserve(rank.group, 12, 10)
    y = group_step(rank, whole, [2, 1] + [0] * (rank.ranks - 2))["y"]
    assert y is not None
    assert_equal_bits(y, torch.full_like(y, 2.0**-9), "y")
    for top_k in (8, 10):
        many = make_inputs(random_routing(12, 16, top_k), 48, 24, 16, dtype=torch.bfloat16)
        tokens = [12 // rank.ranks] * rank.ranks
        actual = check_group(rank, many, tokens)
        wanted = share_of(rank.rank, tokens, 16).of("y", expected_step(many)["y"])
        assert_close(actual["y"], wanted, 5e-3, "y")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a13_combine_over_ranks_sums_above_bfloat16(some_ranks, ranks):
    some_ranks(ranks).run(check_a13)


# -- A19: activation checkpointing ------------------------------------------------------------------------------------


def check_a19(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    expected = run_step(whole)
    check_group(rank, whole, tokens, expected=expected)
    for reentrant in (False, True):

        def call(leaves: LayerInputs, reentrant: bool = reentrant, **options):
            def block(x, topk_weights, w_gate_up, w_down):
                parts = {"x": x, "topk_weights": topk_weights, "w_gate_up": w_gate_up, "w_down": w_down}
                return replace(leaves, **parts).call(**options)

            arguments = (leaves.x, leaves.topk_weights, leaves.w_gate_up, leaves.w_down)
            return checkpoint(block, *arguments, use_reentrant=reentrant)

        check_group(rank, whole, tokens, expected=expected, call=call)
        check_group(rank, whole, tokens, expected=expected, call=call, recompute=True)


def check_a19_with_router(rank: Rank, tokens: list[int]) -> None:
    """The router inside, with tied logits: the recomputation must route as the forward did."""
    whole = make_inputs(random_routing(sum(tokens), 6, 2), 16, 8, 6, dtype=torch.bfloat16)
    share = share_of(rank.rank, tokens, 6)
    router = torch.randn(6, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    router[1], router[4] = router[0], router[3]

    def step(inputs: LayerInputs, dy: torch.Tensor, wrap: bool, **options):
        x, gate = inputs.x.clone().requires_grad_(), router.clone().requires_grad_()
        w_gate_up, w_down = (w.clone().requires_grad_() for w in (inputs.w_gate_up, inputs.w_down))

        def block(x, gate, w_gate_up, w_down):
            weights, idx = (x @ gate.t()).float().softmax(1).topk(2)
            return replace(inputs, x=x, topk_idx=idx, topk_weights=weights, w_gate_up=w_gate_up, w_down=w_down).call(
                **options
            )

        arguments = (x, gate, w_gate_up, w_down)
        y = checkpoint(block, *arguments, use_reentrant=False) if wrap else block(*arguments)
        y.backward(dy)
        return {"y": y.detach(), "x": x.grad, "gate": gate.grad, "w_gate_up": w_gate_up.grad, "w_down": w_down.grad}

    dy = make_dy(whole.x)
    mine = share.inputs(whole)
    plain = step(mine, dy[share.tokens], False, group_name=rank.name)
    wrapped = step(mine, dy[share.tokens], True, group_name=rank.name)
    one = step(whole, dy, False)
    for name in plain:
        assert_equal_bits(wrapped[name], plain[name], name)
        if name != "gate":
            assert_equal_bits(plain[name], share.of(name, one[name]), name)


def test_a19_checkpointing(some_ranks):
    some_ranks(2).run(check_a19, *batch([3, 9], 0, torch.bfloat16))
    some_ranks(2).run(check_a19_with_router, [3, 9])


# -- A21: repeats -----------------------------------------------------------------------------------------------------


def check_a21(rank: Rank, whole: LayerInputs, tokens: list[int]) -> None:
    first = check_group(rank, whole, tokens)
    for repeat in range(19):
        torch.use_deterministic_algorithms(repeat == 18)
        try:
            again = group_step(rank, whole, tokens)
        finally:
            torch.use_deterministic_algorithms(False)
        for name, tensor in again.items():
            assert_equal_bits(tensor, first[name], f"{name} of repeat {repeat}")


def test_a21_repeats_have_equal_bits(some_ranks):
    whole = make_inputs(random_routing(512, 16, 8), 32, 16, 16, dtype=torch.bfloat16)
    some_ranks(2).run(check_a21, whole, [256, 256])


# -- A23: gradients are sums over tokens ------------------------------------------------------------------------------


def check_a23(rank: Rank, whole: LayerInputs) -> None:
    """Bits of one rank for the loss sum(y), and the values of the oracle: no factor of W anywhere."""
    one = torch.ones_like(whole.x)
    check_group(rank, whole, [8, 8], dy=one)
    wanted = share_of(rank.rank, [8, 8], whole.num_experts).results(expected_step(whole, dy=one))
    actual = group_step(rank, whole, [8, 8], dy=one)
    for name, tensor in actual.items():
        assert_close(tensor, wanted[name], 1e-12, name)


def test_a23_gradients_are_sums_over_tokens(some_ranks):
    whole = make_inputs(random_routing(16, 4, 2), **S, bias=True)
    some_ranks(2).run(check_a23, whole)


# -- A24: a batch larger than agreed ----------------------------------------------------------------------------------


def check_a24(rank: Rank) -> None:
    def step(tokens: list[int], seed: int, **options):
        check_group(rank, batch(tokens, seed)[0], tokens, **options)

    def refused(tokens: list[int], message: str) -> None:
        with pytest.raises(moe_megakernel.CapacityError, match=message):
            group_step(rank, batch(tokens, 0)[0], tokens)

    step([64, 64], 0)
    refused([256, 256], "x: expected at most 64 tokens on a rank, got 256 on rank 0; call moe_megakernel.reserve")
    assert moe_megakernel.reserve(rank.group, 256, 2) == (256, 1024)
    step([256, 256], 1)
    step([16, 16], 2)
    refused([256, 300], "x: expected at most 256 tokens on a rank, got 300 on rank 1")
    # Each rank names its own figures; the largest is agreed, and a smaller one changes nothing.
    assert moe_megakernel.reserve(rank.group, [0, 300][rank.rank], 2) == (300, 1200)
    assert moe_megakernel.reserve(rank.group, 1, 2) == (300, 1200)
    step([256, 300], 3)
    whole, tokens = batch([300, 300], 4)
    whole.topk_idx.copy_(torch.tensor([0, 1]))
    check_group(rank, whole, tokens)
    whole, tokens = batch([300, 300], 5)
    whole.topk_idx[:] = 1
    check_group(rank, whole, tokens)


def test_a24_a_larger_batch_needs_reserve(some_ranks):
    some_ranks(2).run(check_a24)
