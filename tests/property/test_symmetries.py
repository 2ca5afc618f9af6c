"""What must not change a result: the names of experts, routes that are dropped, experts that nobody uses.

Bit for bit where the contract fixes the order of every sum; to rounding where the order itself is permuted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.strategies import layers
from tests.steps import ALL_DTYPES, Results, assert_same_bits, make_dy, run_step
from torch import Tensor

from moe_megakernel.testing import LayerInputs, relative_error

PARAMETERS = ("w_gate_up", "w_down", "bias_gate_up", "bias_down")
TOKENS = ("y", "x", "topk_weights")
BITS = layers(tuple(ALL_DTYPES))
RUN = settings(max_examples=30, deadline=None, derandomize=True)


def parameters(inputs: LayerInputs) -> dict[str, Tensor]:
    return {name: tensor for name in PARAMETERS if (tensor := getattr(inputs, name)) is not None}


def pick(results: Results, names: tuple[str, ...], index: Any) -> Results:
    """The named results at an index of their first dimension, the others as they are."""
    return {n: t[index] if n in names and t is not None else t for n, t in results.items()}


def assert_near(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        want = expected[name]
        assert tensor is not None
        assert want is not None
        if float(want.norm()) > 1e-3 or float(tensor.norm()) > 1e-3:
            assert relative_error(tensor, want) < 1e-11, name


@RUN
@given(BITS, st.randoms(use_true_random=False))
def test_names_of_experts(inputs: LayerInputs, random: Any) -> None:
    """Relabelled experts give the same bits: an expert's sums depend on its own rows only."""
    names = list(range(inputs.num_experts))
    random.shuffle(names)  # expert e is now called names[e]
    order = torch.tensor(names).argsort()
    changes: dict[str, Any] = {name: tensor[order] for name, tensor in parameters(inputs).items()}
    ids = torch.tensor([*names, -1])[inputs.topk_idx.long()].to(inputs.topk_idx.dtype)
    renamed = run_step(replace(inputs, topk_idx=ids, **changes))
    assert_same_bits(renamed, pick(run_step(inputs), PARAMETERS, order))


@RUN
@given(BITS)
def test_experts_that_nobody_uses(inputs: LayerInputs) -> None:
    own = parameters(inputs)
    changes: dict[str, Any] = {n: torch.cat([t, torch.full_like(t[:1], torch.nan)]) for n, t in own.items()}
    wider = run_step(replace(inputs, num_experts=inputs.num_experts + 1, **changes))
    for name in changes:
        tensor = wider[name]
        assert tensor is not None
        assert not tensor[-1].any()
    assert_same_bits(pick(wider, PARAMETERS, slice(-1)), run_step(inputs))


@RUN
@given(BITS, st.integers(0, 2**16))
def test_tokens_without_routes(inputs: LayerInputs, seed: int) -> None:
    """Tokens whose routes are all dropped, put anywhere, get zeros, and the others keep their bits.

    Up to 64 tokens: beyond, the order of an expert's rows depends on the token's index.
    """
    tokens = inputs.x.shape[0]
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(tokens + 5, generator=generator)[:tokens].sort().values

    def spread(tensor: Tensor, fill: float) -> Tensor:
        out = torch.full((tokens + 5, *tensor.shape[1:]), fill, dtype=tensor.dtype)
        out[kept] = tensor
        return out

    wide = replace(
        inputs,
        x=spread(inputs.x, torch.nan),
        topk_idx=spread(inputs.topk_idx, -1),
        topk_weights=spread(inputs.topk_weights, torch.nan),
    )
    dy = make_dy(inputs.x)
    results = run_step(wide, dy=spread(dy, torch.nan))
    for name in TOKENS:
        tensor = results[name]
        assert tensor is not None
        rest = tensor.clone()
        rest[kept] = 0
        assert not rest.any(), name
    assert_same_bits(pick(results, TOKENS, kept), run_step(inputs, dy=dy))


@RUN
@given(BITS)
def test_dropped_slots_at_the_end(inputs: LayerInputs) -> None:
    """Further slots that are all -1 change nothing."""
    more = (inputs.x.shape[0], 2)
    ids = torch.cat([inputs.topk_idx, torch.full(more, -1, dtype=inputs.topk_idx.dtype)], dim=1)
    weights = torch.cat([inputs.topk_weights, torch.full(more, torch.nan, dtype=inputs.topk_weights.dtype)], dim=1)
    results = run_step(replace(inputs, topk_idx=ids, topk_weights=weights))
    assert results["topk_weights"] is not None
    assert not results["topk_weights"][:, -2:].any()
    results["topk_weights"] = results["topk_weights"][:, :-2].contiguous()
    assert_same_bits(results, run_step(inputs))


@RUN
@given(layers(), st.integers(0, 2**16))
def test_order_of_tokens_and_slots(inputs: LayerInputs, seed: int) -> None:
    tokens, top_k = inputs.topk_idx.shape
    generator = torch.Generator().manual_seed(seed)
    rows, slots = torch.randperm(tokens, generator=generator), torch.randperm(top_k, generator=generator)
    ids, weights = inputs.topk_idx[rows][:, slots], inputs.topk_weights[rows][:, slots]
    shuffled = replace(inputs, x=inputs.x[rows], topk_idx=ids, topk_weights=weights)
    dy = make_dy(inputs.x)
    expected = pick(run_step(inputs, dy=dy), TOKENS, rows)
    assert expected["topk_weights"] is not None
    expected["topk_weights"] = expected["topk_weights"][:, slots]
    assert_near(run_step(shuffled, dy=dy[rows]), expected)


@RUN
@given(layers())
def test_duplicates_sum(inputs: LayerInputs) -> None:
    """Every route twice, each with half its weight, is the layer itself; each half gets the whole weight gradient."""
    ids = torch.cat([inputs.topk_idx, inputs.topk_idx], dim=1)
    half = inputs.topk_weights / 2
    results = run_step(replace(inputs, topk_idx=ids, topk_weights=torch.cat([half, half], dim=1)))
    expected = run_step(inputs)
    assert expected["topk_weights"] is not None
    expected["topk_weights"] = torch.cat([expected["topk_weights"]] * 2, dim=1)
    assert_near(results, expected)


@RUN
@given(layers(), st.integers(0, 40))
def test_gradients_are_sums_over_tokens(inputs: LayerInputs, cut: int) -> None:
    """Two part batches give the rows of the whole one, and weight gradients that add up to its."""
    parts = [slice(0, cut), slice(cut, None)]
    dy = make_dy(inputs.x)
    halves = [
        run_step(
            replace(inputs, x=inputs.x[p], topk_idx=inputs.topk_idx[p], topk_weights=inputs.topk_weights[p]), dy=dy[p]
        )
        for p in parts
    ]
    joined: Results = {}
    for name, first in halves[0].items():
        second = halves[1][name]
        assert first is not None
        assert second is not None
        joined[name] = torch.cat([first, second]) if name in TOKENS else first + second
    assert_near(joined, run_step(inputs, dy=dy))
