"""Shares of links: an example worked out by hand, and the rules of max-min fairness on random loads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_megakernel.simulate.links import fair_rates, stream_usage


def test_a_full_resource_stops_only_the_streams_that_use_it() -> None:
    # Streams 0 and 1 share resource 0 of 10; stream 2 is alone on resource 1 and wants 7.
    usage = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    rates = fair_rates(usage, np.array([10.0, 100.0]), np.array([50.0, 50.0, 7.0]))
    assert np.allclose(rates, [5.0, 5.0, 7.0])


def test_a_stream_with_little_demand_leaves_room_for_others() -> None:
    rates = fair_rates(np.ones((1, 3)), np.array([10.0]), np.array([1.0, 50.0, 50.0]))
    assert np.allclose(rates, [1.0, 4.5, 4.5])


def test_infinite_links_give_every_demand() -> None:
    demand = np.array([3.0, 0.0, 9.0])
    assert np.allclose(fair_rates(np.ones((2, 3)), np.full(2, np.inf), demand), demand)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_rates_are_feasible_and_nobody_can_get_more(resources: int, streams: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    usage = rng.uniform(0.1, 2.0, (resources, streams)) * (rng.random((resources, streams)) < 0.6)
    capacity = rng.uniform(1.0, 10.0, resources)
    demand = rng.uniform(0.0, 10.0, streams)
    rates = fair_rates(usage, capacity, demand)
    load = usage @ rates
    assert (load <= capacity * (1 + 1e-6)).all()
    assert (rates <= demand * (1 + 1e-6)).all()
    full = load >= capacity * (1 - 1e-6)
    for stream in range(streams):
        assert rates[stream] >= demand[stream] * (1 - 1e-6) or (usage[full, stream] > 0).any()


def test_usage_of_readers_loads_their_ingress_and_the_peers_egress() -> None:
    # Rank 0 reads half of its rows from itself and half from rank 1; rank 1 reads all from rank 0.
    usage = stream_usage(np.array([[0.5, 0.5], [1.0, 0.0]]), wire=1.25, reading=True)
    egress, ingress, engine = usage[:2], usage[2:4], usage[4:]
    assert np.allclose(egress, [[0.0, 1.25], [0.625, 0.0]])
    assert np.allclose(ingress, [[0.625, 0.0], [0.0, 1.25]])
    assert np.allclose(engine, np.eye(2))
