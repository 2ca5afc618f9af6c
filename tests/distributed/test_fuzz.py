"""Random batches over random splits: y, gradients and main gradients have the bits of one rank.

Fixed seeds, so that a failure names the case to run again. All cases of a number of ranks run in one call of the pool
and in one group, one after the other, whose capacity grows with them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.distributed.split import check_group, group_step, reserve_all, share_of
from tests.distributed.worker import Rank
from tests.steps import ACTIVATION_CASES, make_dy, run_step

from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, poisoned_memory, random_routing

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Case:
    """One random batch: arguments of all ranks together, tokens of each rank, and how the op is called."""

    seed: int
    whole: LayerInputs
    tokens: list[int]
    requires_grad: dict[str, bool]
    main_grads: list[str]
    options: dict[str, Any] = field(default_factory=dict)


def random_case(seed: int, ranks: int) -> Case:
    draw = random.Random(seed)
    num_experts, top_k = draw.choice([1, 2, 3, 4, 5, 6, 8, 11]), draw.choice([1, 1, 2, 3, 4])
    tokens = [draw.choice([0, 0, 1, 2, 3, 5, 8, 17, 40, 66]) for _ in range(ranks)]
    idx = random_routing(
        sum(tokens), num_experts, top_k, zipf=draw.choice([0.0, 1.0, 2.0]), drop=draw.choice([0.0, 0.0, 0.3]), seed=seed
    )
    kind = draw.choice(["as drawn", "as drawn", "as drawn", "one expert", "duplicates", "all dropped"])
    if kind == "one expert":
        idx[:] = draw.randrange(num_experts)
    elif kind == "duplicates":
        idx = idx[:, :1].repeat(1, top_k)
    elif kind == "all dropped":
        idx[:] = -1
    whole = make_inputs(
        idx.int() if draw.random() < 0.3 else idx,
        draw.choice([1, 3, 8, 16, 33, 64]),
        draw.choice([1, 4, 7, 16, 32]),
        num_experts,
        bias=draw.random() < 0.5,
        dtype=draw.choice([torch.bfloat16, torch.bfloat16, torch.float32, torch.float64, torch.float16]),
        seed=seed,
        **draw.choice(ACTIVATION_CASES),
    )
    wants = {name: draw.random() < 0.8 for name in whole.grads()}
    wants["x"] |= not any(wants.values())
    main_grads = [n for n in ("w_gate_up", "w_down") if wants[n] and draw.random() < 0.2]
    return Case(seed, whole, tokens, wants, main_grads, {"recompute": draw.random() < 0.25})


def check_case(rank: Rank, case: Case) -> None:
    whole, tokens = case.whole, case.tokens
    step = {"requires_grad": case.requires_grad, "dy": make_dy(whole.x, case.seed), **case.options}
    if not case.main_grads:
        check_group(rank, whole, tokens, **step)
        return
    share = share_of(rank.rank, tokens, whole.num_experts)
    wide = torch.float64 if whole.x.dtype == torch.float64 else torch.float32
    start = {n: torch.full_like(getattr(whole, n), 0.5, dtype=wide) for n in case.main_grads}
    one = {f"main_grad_{n[2:]}": tensor.clone() for n, tensor in start.items()}
    many = {f"main_grad_{n[2:]}": share.of(n, tensor).clone() for n, tensor in start.items()}
    wanted = share.results(run_step(whole, **step, **one))
    actual = group_step(rank, whole, tokens, **step, **many)
    for name, tensor in actual.items():
        assert_equal_bits(tensor, wanted[name], name)
    for name, buffer in many.items():
        assert_equal_bits(buffer, share.of(name, one[name]), name)


def check_cases(rank: Rank, seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, rank.ranks)
        reserve_all(rank, case.tokens, case.whole.topk_idx.shape[1])
        try:
            with poisoned_memory():
                check_case(rank, case)
        except Exception as error:
            raise AssertionError(f"random_case({seed}, {rank.ranks}): {error}") from error


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(80)), (4, range(1000, 1040))], ids=["2", "4"])
def test_random_batches_have_the_bits_of_one_rank(some_ranks, ranks, seeds):
    some_ranks(ranks).run(check_cases, seeds)
