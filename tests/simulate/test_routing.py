"""Drawn routing: every rank sends tokens * top_k rows, no expert gets a token twice, and Zipf is skewed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_megakernel.simulate import SimulateError
from moe_megakernel.simulate.routing import draw_counts, expert_probabilities


@given(
    st.integers(1, 40), st.integers(1, 8), st.integers(1, 5), st.integers(1, 64), st.sampled_from([0.0, 0.5, 1.0, 3.0])
)
def test_counts_sum_to_all_routes(experts: int, top_k: int, ranks: int, tokens: int, exponent: float) -> None:
    top_k = min(top_k, experts)
    counts = draw_counts(experts, top_k, ranks, tokens, f"zipf:{exponent}", seed=1)
    assert counts.shape == (ranks, experts)
    assert (counts.sum(axis=1) == tokens * top_k).all()
    assert (counts >= 0).all()
    assert (counts <= tokens).all()


def test_probabilities_are_capped_at_one_and_sum_to_top_k() -> None:
    probability = expert_probabilities(64, 8, 2.0, np.random.default_rng(0))
    assert probability.sum() == pytest.approx(8)
    assert probability.max() == 1.0


def test_expected_uniform_routing_is_even() -> None:
    counts = draw_counts(16, 4, 4, 256, "uniform", seed=0, exact=True)
    assert (counts == 64).all()


@pytest.mark.parametrize("routing", ["even", "zipf", "zipf:x", "zipf:-1", "zipf:nan", "zipf:11"])
def test_unknown_routing_is_refused(routing: str) -> None:
    with pytest.raises(SimulateError, match="simulate: routing: expected uniform or zipf:S"):
        draw_counts(8, 2, 1, 8, routing, seed=0)
