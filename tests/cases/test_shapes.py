"""Cases A07 and A08: widths that fit no tile, and ragged numbers of rows per expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.steps import assert_same_bits, check_step, name_of, run_step

from moe_megakernel.testing import assert_equal_bits, make_inputs, poisoned_memory, random_routing

COUNTS = [1, 0, 7, 8, 63, 64, 65, 127, 128, 129, 256, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("hidden", [2880, 1025, 1032, 200, 72, 7])
def test_a07_hidden_width(hidden: int, dtype: torch.dtype) -> None:
    check_step(make_inputs(random_routing(8, 4, 2), hidden, 64, dtype=dtype))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(("hidden", "width"), [(1, 64), (1, 1), (7, 1), (64, 33), (33, 65), (3, 257)])
def test_a07_odd_widths(hidden: int, width: int, activation: str) -> None:
    for dtype in (torch.float64, torch.float32):
        check_step(make_inputs(random_routing(8, 4, 2), hidden, width, activation=activation, bias=True, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a08_ragged_counts(dtype: torch.dtype) -> None:
    ids = torch.arange(12).repeat_interleave(torch.tensor(COUNTS))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    check_step(make_inputs(ids[:, None], 256, 128, 12, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_a08_one_token(dtype: torch.dtype) -> None:
    check_step(make_inputs(torch.tensor([[2, 1]]), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a08_neighbouring_experts_rows(dtype: torch.dtype) -> None:
    """NaN in the rows of one expert stays with its tokens and its weights; everything else keeps its bits."""
    ids = torch.arange(12).repeat_interleave(torch.tensor(COUNTS))
    clean = make_inputs(ids[:, None], 32, 16, 12, bias=True, dtype=dtype)
    with poisoned_memory():
        expected = run_step(clean)
        for expert in (0, 6, 10):
            sick = ids == expert
            results = run_step(replace(clean, x=clean.x.masked_fill(sick[:, None], torch.nan)))
            for name, tensor in results.items():
                want = expected[name]
                assert tensor is not None
                assert want is not None
                per_token = name in ("y", "x", "topk_weights")
                touched = sick if per_token else torch.arange(12) == expert
                assert_equal_bits(tensor[~touched], want[~touched], f"{name}, NaN at expert {expert}")
                if name != "bias_down":  # which reads no activation
                    assert tensor[touched].isnan().all(), f"{name}, NaN at expert {expert}"


def test_a08_bits_do_not_depend_on_other_experts() -> None:
    """An expert's rows alone give the bits that they give among others."""
    inputs = make_inputs(torch.arange(4).repeat(11)[:, None], 40, 24, dtype=torch.float32)
    whole = run_step(inputs)
    for expert in range(4):
        alone = replace(inputs, topk_idx=torch.where(inputs.topk_idx == expert, inputs.topk_idx, -1))
        results = run_step(alone)
        mine = (inputs.topk_idx == expert)[:, 0]
        picked = {n: t if t is None else t[mine if len(t) == 44 else expert] for n, t in results.items()}
        assert_same_bits(picked, {n: t if t is None else t[mine if len(t) == 44 else expert] for n, t in whole.items()})
