"""The simulated layer: nothing is lost or made up, waits are kept, and better hardware is never slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_megakernel.hardware import GB300, H200
from moe_megakernel.plan_names import TaskKind
from moe_megakernel.shapes import SHAPES
from moe_megakernel.simulate import ORDERS, Layer, Options, make_options, simulate
from moe_megakernel.simulate.layer import free_links

from .small import SHAPE, small_options

# Steps of the clock and rounding; times are compared within this share.
NEAR = 2e-3


def layer_time(options: Options) -> float:
    return sum(float(layer.run.ends.max()) for layer in simulate(options, exposed=False))


@pytest.fixture(scope="module", params=[("forward", name) for name in ORDERS] + [("backward", "lagged")])
def recorded(request: pytest.FixtureRequest) -> Layer:
    direction, order = request.param
    comm_sms = 20 if order == "sm-split" else -1
    options = small_options(direction=direction, order=order, comm_sms=comm_sms, tokens=700, expected_routing=False)
    return simulate(options, record=True, exposed=False)[0]


def test_every_task_runs_once_and_busy_time_is_the_sum_of_their_costs(recorded: Layer) -> None:
    for rank, stream in zip(recorded.run.ranks, recorded.streams, strict=True):
        assert rank.spans is not None
        assert sorted(task for task, *_ in rank.spans) == list(range(len(stream.main)))
        assert rank.busy == pytest.approx(sum(end - start for *_, start, end in rank.spans))
        least = stream.main.sum() + len(stream.main) * rank.drain
        assert least <= rank.busy * (1 + 1e-9)
        assert rank.busy <= least * rank.slowdown + len(stream.main) * rank.fill


def test_a_cluster_does_one_task_at_a_time_and_its_time_adds_up(recorded: Layer) -> None:
    for rank in recorded.run.ranks:
        by_cluster: dict[int, list[tuple[float, float]]] = {}
        for _, cluster, start, end in rank.spans or []:
            by_cluster.setdefault(cluster, []).append((start, end))
        waited = 0.0
        for spans in by_cluster.values():
            ends = [recorded.run.start, *(end for _, end in spans)]
            gaps = [start - end for (start, _), end in zip(spans, ends, strict=False)]
            assert min(gaps) >= -1e-12
            waited += sum(gaps)
        assert rank.waited.sum() == pytest.approx(waited, abs=1e-9)


def test_tasks_start_after_what_they_wait_for(recorded: Layer) -> None:
    for rank, stream in zip(recorded.run.ranks, recorded.streams, strict=True):
        raised: dict[int, float] = {}
        for task, _, _, end in rank.spans or []:
            for event, _ in stream.raises[task]:
                raised[event] = max(raised.get(event, 0.0), end)
        for task, _, start, _ in rank.spans or []:
            for event in stream.waits[task]:
                assert rank.left[event] == 0
                assert start >= rank.when[event] - 1e-12
                assert start >= raised.get(event, 0.0) - 1e-12


def test_rows_and_bytes_are_conserved(recorded: Layer) -> None:
    options, run = recorded.options, recorded.run
    routes = options.tokens * options.shape.top_k * options.ranks
    assert sum(stream.rows for stream in recorded.streams) == routes
    row = options.shape.hidden * 2
    sources = 2 if recorded.direction == "backward" else 1
    pulled = sum(stream.pull_bytes.sum() for stream in recorded.streams)
    home = sum(sum(stream.home) for stream in recorded.streams)
    assert pulled == pytest.approx(sources * routes * row)
    assert home == pytest.approx(routes * row)
    remote = 1.0 - np.trace(recorded.rows) / recorded.rows.sum()
    gpu = options.hardware
    wire = remote * routes * row * (sources / gpu.pull_achievable + 1.0 / gpu.push_achievable)
    assert run.egress.sum() == pytest.approx(wire, rel=1e-3)
    assert run.ingress.sum() == pytest.approx(wire, rel=1e-3)
    assert run.egress.max() <= gpu.link_bandwidth * run.step * (1 + 1e-6)


def test_padding_is_computed_but_not_moved() -> None:
    # 64 rows an expert from four ranks: 256 with padding and without.
    same = small_options(order="sm-split", comm_sms=20)
    assert same.how.row_padding == 256
    more = replace(same, tokens=272)
    fewer, padded = simulate(same, exposed=False)[0], simulate(more, exposed=False)[0]
    assert len(padded.streams[0].main) == 2 * len(fewer.streams[0].main)
    assert padded.streams[0].pull_bytes.sum() == pytest.approx(fewer.streams[0].pull_bytes.sum() * 272 / 256)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", ORDERS)
def test_more_bandwidth_and_more_sms_are_never_slower(order: str, direction: str) -> None:
    slow = replace(H200, link_bandwidth=20e9, hbm_bandwidth=1e12, sms=64)
    options = small_options(slow, order=order, direction=direction, comm_sms=20 if order == "sm-split" else -1)
    time = layer_time(options)
    for faster in (
        replace(slow, link_bandwidth=80e9),
        replace(slow, hbm_bandwidth=4e12),
        replace(slow, bf16_flops=slow.bf16_flops * 2.0),
        replace(slow, sms=96, bf16_flops=slow.bf16_flops * 1.5),
    ):
        assert layer_time(replace(options, hardware=faster)) <= time * (1 + NEAR)


def test_slower_links_are_slower() -> None:
    options = small_options()
    slower = replace(options, hardware=replace(H200, link_bandwidth=5e9))
    assert layer_time(slower) > 2.0 * layer_time(options)


@pytest.mark.parametrize("slug", [slug for slug in SHAPES if not slug.startswith("bench-")])
def test_lagged_is_never_slower_than_unlagged(slug: str) -> None:
    options = make_options(slug, "h200", ranks=8, tokens=1024)
    lagged, unlagged = layer_time(options), layer_time(replace(options, order="unlagged"))
    assert lagged <= unlagged * (1 + NEAR)
    assert lagged < layer_time(replace(options, order="separate"))


@pytest.mark.parametrize("order", ORDERS)
def test_links_that_take_no_time_expose_nothing(order: str) -> None:
    (layer,) = simulate(small_options(free_links(H200), order=order, comm_sms=20 if order == "sm-split" else -1))
    assert layer.exposed == 0.0


def test_slow_links_expose_most_of_the_time() -> None:
    (layer,) = simulate(small_options(replace(H200, link_bandwidth=5e9)))
    assert layer.exposed > 0.5


def test_the_same_options_give_the_same_numbers() -> None:
    options = small_options(expected_routing=False, seed=3)
    assert layer_time(options) == layer_time(options)


def test_pushing_couples_ranks_under_skew() -> None:
    """A pushing rank is held up by the busiest reader, a pulling one is not: rows reach the others later."""
    shape = replace(SHAPE, num_experts=64)
    options = replace(small_options(replace(H200, link_bandwidth=40e9)), shape=shape, ranks=8, routing="zipf:1.0")
    pull = simulate(options, exposed=False)[0].run.dispatch_end
    push = simulate(replace(options, transport="push"), exposed=False)[0].run.dispatch_end
    assert np.median(push) > 1.2 * np.median(pull)


def test_one_rank_alone_and_ranks_without_experts() -> None:
    (alone,) = simulate(small_options(ranks=1), exposed=False)
    assert alone.run.egress.sum() == 0.0
    few = replace(small_options(ranks=4), shape=replace(SHAPE, num_experts=2, top_k=2))
    (layer,) = simulate(few, exposed=False)
    assert [stream.rows for stream in layer.streams] == [1024, 1024, 0, 0]


def test_backward_has_the_weight_gradients_and_takes_longer() -> None:
    forward, backward = simulate(small_options(direction="both", tokens=2048), exposed=False)
    kinds = set(backward.streams[0].kind.tolist())
    assert {TaskKind.WGRAD_DOWN, TaskKind.WGRAD_GATE_UP, TaskKind.DOWN_DGRAD, TaskKind.GATE_UP_DGRAD} <= kinds
    assert backward.run.ends.max() > 1.3 * forward.run.ends.max()


def test_72_ranks_take_well_under_a_minute() -> None:
    options = make_options("kimi-k2", "gb300", ranks=72, tokens=256)
    (layer,) = simulate(options, exposed=False)
    assert len(layer.run.ranks) == 72
    assert 0.0 < layer.run.ends.max() < 2e-3
    assert options.hardware is GB300
