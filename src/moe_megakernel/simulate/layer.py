"""One simulated layer: makes every rank's plan for the drawn routing, chooses the order's timing, runs it, and runs it
again with links that take no time to see what communication costs. The package's main entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_megakernel.distributed.partition import expert_range
from moe_megakernel.hardware import Hardware
from moe_megakernel.plan import ROW_TILE, GradNeeds, PlanConfig, PlanTables, Problem, Schedule, Tiling, make_plan
from moe_megakernel.plan_names import Counter, Direction

from .costs import LAUNCH_GAP, PUSH_SIGNAL, ROUTE_TIME, Costs
from .engine import Run, Timing, run_layer
from .options import Options
from .routing import draw_counts
from .stream import Stream, make_stream

#: What a backward computes: all but gradients of biases, which named shapes do not have.
NEEDS = GradNeeds(bias_gate_up=False, bias_down=False)

_STEPS = 1000  # of a layer at full compute rate
_LONGEST_STEP = 4e-6  # seconds, and the shortest an eighth of it
_RESIDUES = 64  # classes of tokens in the plan's counts


@dataclass
class Layer:
    """One direction of one layer, simulated."""

    options: Options
    direction: str
    rows: np.ndarray  # [W, W] rows from each rank to each rank's experts
    streams: list[Stream]
    run: Run
    exposed: float  # share of the layer's time that links which take no time would save
    costs: Costs


def simulate(options: Options, record: bool = False, exposed: bool = True) -> list[Layer]:
    """Simulates the directions that `options` ask for.

    Args:
        options: what to simulate.
        record: keep the spans of all tasks, for traces and pictures.
        exposed: run a second time with links that take no time; else `Layer.exposed` is nan.
    """
    counts = draw_counts(
        options.shape.num_experts,
        options.shape.top_k,
        options.ranks,
        options.tokens,
        options.routing,
        options.seed,
        options.expected_routing,
    )
    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    return [_simulate(options, direction, counts, record, exposed) for direction in directions]


def free_links(hardware: Hardware) -> Hardware:
    """The same GPU with links that take no time."""
    return replace(
        hardware,
        link_bandwidth=float("inf"),
        link_latency=0.0,
        pull_rate_per_warp=float("inf"),
        copy_rate_per_sm=float("inf"),
    )


def _simulate(options: Options, direction: str, counts: np.ndarray, record: bool, exposed: bool) -> Layer:
    costs = Costs(options.shape, options.hardware, Tiling(), options.dtype, options.clusters(direction))
    rows = _rows_between(counts, options.ranks)
    plans = make_plans(options, direction, counts, costs)
    streams = [
        _stream(plan, direction, costs, options, arriving) for plan, arriving in zip(plans, rows.sum(0), strict=True)
    ]
    step = _step(streams, costs)
    hardware = options.hardware
    run = run_layer(streams, rows, costs, hardware, make_timing(options, hardware, direction, costs), step, record)
    share = float("nan")
    if exposed:
        free = free_links(hardware)
        ideal = run_layer(streams, rows, costs, free, make_timing(options, free, direction, costs), step, False)
        share = max(0.0, 1.0 - float(ideal.ends.max()) / float(run.ends.max()))
    return Layer(options, direction, rows, streams, run, share, costs)


def make_plans(options: Options, direction: str, counts: np.ndarray, costs: Costs) -> list[PlanTables]:
    """Every rank's plan, from the C++ that the kernels share. An order's padding of experts is planned as rows."""
    total = counts.sum(axis=0)
    planned = counts.copy()
    planned[0] += -total % options.how.row_padding if options.how.row_padding > ROW_TILE else 0
    counts = planned
    most = max(options.tokens, -(-int(counts.sum(axis=1).max()) // options.shape.top_k))
    spread = (counts[:, :, None] // _RESIDUES) + (np.arange(_RESIDUES) < (counts % _RESIDUES)[:, :, None])
    class_counts = torch.from_numpy(spread.astype(np.int32))
    tokens = torch.full((options.ranks,), most)
    problem = Problem(
        num_ranks=options.ranks,
        rank=0,
        num_experts=options.shape.num_experts,
        top_k=options.shape.top_k,
        hidden=options.shape.hidden,
        width=options.shape.width,
        gated=options.shape.gated,
        max_tokens=most,
        row_capacity=int(counts.sum()),
    )
    config = PlanConfig(problem, costs.tiles, make_schedule(options, direction, costs))
    way = Direction.FORWARD if direction == "forward" else Direction.BACKWARD
    return [make_plan(config.for_rank(rank), class_counts, tokens, way, NEEDS) for rank in range(options.ranks)]


def make_schedule(options: Options, direction: str, costs: Costs) -> Schedule:
    """The plan's schedule for an order: minibatches, lag, rings."""
    how = options.how
    act_tiles = -(-options.shape.width // costs.tiles.act_columns)
    schedule = Schedule(num_clusters=costs.clusters, lag=how.lag, separate_stages=how.separate)
    if options.minibatch_rows > 0:
        # As many tasks as the rows have; small segments, so that a minibatch is not longer than asked for.
        tasks = max(1, options.minibatch_rows // 128 * act_tiles // 2)
        schedule = replace(schedule, num_clusters=tasks, waves=1, segment_tiles=2)
    minibatch_tiles = -(-2 * schedule.waves * schedule.num_clusters // act_tiles)
    slots = max(48, minibatch_tiles + 2 * schedule.segment_tiles)
    if how.wait_for != "tile" or options.transport == "push":
        slots = 1 << 20  # no ring: every row has a place of its own
    # One minibatch more than order needs, so that nobody waits for the last reader of a slot.
    activations = 0 if how.separate else (how.lag + 2) * (minibatch_tiles + schedule.segment_tiles)
    return replace(schedule, x_slots=slots, a_slots=activations)


def make_timing(options: Options, hardware: Hardware, direction: str, costs: Costs) -> Timing:
    """What the order adds around tasks and transfers."""
    how, comm_sms = options.how, options.communication_sms(direction)
    spare = comm_sms == 0 and not how.separate
    engine = (
        hardware.pull_rate_per_warp * hardware.sms if spare else hardware.copy_rate_per_sm * (comm_sms or hardware.sms)
    )
    flag = hardware.link_latency + hardware.flag_latency
    barrier = LAUNCH_GAP + 2.0 * hardware.link_latency + hardware.flag_latency
    push = options.transport == "push"
    # A pull's first byte takes a round trip; a push tells the reader that it has come, one peer after the other.
    signal = flag + PUSH_SIGNAL * (options.ranks - 1) if push else 2.0 * hardware.link_latency + hardware.flag_latency
    return Timing(
        start=ROUTE_TIME + (barrier if how.barriers else 0.0) + (LAUNCH_GAP if how.separate else 0.0),
        engine_rate=engine,
        engine_sends=not spare,
        spare_warps=spare,
        push=push,
        arrival=signal if options.ranks > 1 else hardware.flag_latency,
        close=flag + (barrier if how.barriers > 1 else 0.0) + (LAUNCH_GAP if how.separate else 0.0),
        combine=costs.combine_seconds(options.tokens),
        combine_beside=direction == "backward" and not how.separate,
        end=0.0,
    )


def _stream(plan: PlanTables, direction: str, costs: Costs, options: Options, arriving: float) -> Stream:
    """A rank's stream with the order's delays; of the planned rows only those that arrive move."""
    stream = make_stream(plan, costs, options.how.wait_for, arriving)
    counters = np.array(stream.counter_of_event)
    if options.how.separate:
        stages = (Counter.X_READY, Counter.DY_READY, Counter.A_READY, Counter.DH_READY, Counter.STORED)
        stream.delays[np.isin(counters, stages)] += LAUNCH_GAP
    if not options.how.fused_activation:
        groups = counters == (Counter.A_READY if direction == "forward" else Counter.DH_READY)
        stream.delays[groups] += costs.activation_pass(stream.rows / max(1, stream.num_minibatches))
    return stream


def _rows_between(counts: np.ndarray, ranks: int) -> np.ndarray:
    owned = [expert_range(counts.shape[1], rank, ranks) for rank in range(ranks)]
    return np.stack([counts[:, own.start : own.stop].sum(axis=1) for own in owned], axis=1).astype(float)


def _step(streams: list[Stream], costs: Costs) -> float:
    """Seconds; from the longest rank's products alone, so that it does not change with links."""
    longest = max(float(stream.main.sum()) for stream in streams) / costs.clusters
    return min(max(longest / _STEPS, _LONGEST_STEP / 8.0), _LONGEST_STEP)
