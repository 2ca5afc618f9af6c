"""What every rank runs: tests both directions, then times them in turn. Sent to the ranks by `__main__`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moe_megakernel.bench.timing import SLEEP_CYCLES, Flush, Times, summary

from .. import report
from ..group import Rank
from .library import Library
from .mover import Mover
from .moves import DIRECTIONS, Traffic, make_routes, make_traffic


@dataclass(frozen=True)
class Config:
    """tokens: T of every rank; blocks: of a launch, or 0 for an even part of the GPU; cold: replace what caches hold
    before each launch; timeout: seconds of a launch.
    """

    tokens: int
    hidden: int
    num_experts: int
    top_k: int
    routings: tuple[str, ...]
    warps: tuple[int, ...]
    blocks: int
    rounds: int
    cold: bool
    timeout: float
    library: Path


@dataclass(frozen=True)
class Found:
    """One routing and number of warps: times of the last rank by direction, and what travelled."""

    routing: str
    warps: int
    blocks: int
    rows: int
    rows_busiest: int
    remote_share: float
    times: dict[str, Times]


def blocks_of_rank(asked: int, sms: int, ranks: int, shares_gpu: bool) -> int:
    """Blocks of a launch: as many as asked for, or those that all ranks of a GPU can have at once."""
    return asked or max(1, sms // ranks if shares_gpu else sms)


def last_rank(spans_by_rank: list[list[float]]) -> Times:
    """Of each round the slowest rank, over all rounds."""
    spans = [max(of_round) for of_round in zip(*spans_by_rank, strict=True)]
    return summary(spans)


def measure(rank: Rank, config: Config, commit: str) -> tuple[dict[str, str], list[Found]]:
    """Where it ran, and what came out; the same on every rank."""
    library = Library(config.library)
    sms = torch.cuda.get_device_properties(rank.device).multi_processor_count
    blocks = blocks_of_rank(config.blocks, sms, rank.ranks, rank.shares_gpu)
    results = []
    for routing in config.routings:
        routes = make_routes(rank.ranks, config.tokens, config.num_experts, config.top_k, routing)
        traffic = make_traffic(routes, config.num_experts)
        mover = Mover(library, rank, traffic, config.tokens, config.hidden, config.timeout)
        for warps in config.warps:
            mover.blocks, mover.warps = blocks, warps
            for direction in DIRECTIONS:
                mover.test(direction)
            times = time_directions(rank, mover, config)
            results.append(_found(routing, warps, blocks, traffic, times))
        rank.meet()  # nobody frees what another still reads
        del mover
    return report.machine(commit), results


def time_directions(rank: Rank, mover: Mover, config: Config) -> dict[str, Times]:
    """Each direction once a round, in turn the first; milliseconds from a common start to the last rank's end."""
    flush = Flush() if config.cold else None
    for direction in DIRECTIONS * 2:
        mover.move(direction)
    spans: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    for number in range(config.rounds):
        events = {}
        for direction in DIRECTIONS if number % 2 else DIRECTIONS[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush is not None:
                flush()
            torch.cuda._sleep(SLEEP_CYCLES)
            mover.meet()
            begin.record()
            mover.move(direction)
            end.record()
            events[direction] = (begin, end)
        torch.cuda.synchronize()
        mover.raise_failure()
        for direction, (begin, end) in events.items():
            spans[direction].append(begin.elapsed_time(end))
    for direction in DIRECTIONS:
        mover.test(direction)  # still right after many launches
    by_rank = rank.gather(spans)
    return {name: last_rank([mine[name] for mine in by_rank]) for name in DIRECTIONS}


def _found(routing: str, warps: int, blocks: int, traffic: Traffic, times: dict[str, Times]) -> Found:
    received = traffic.received
    return Found(routing, warps, blocks, sum(received), max(received), traffic.remote_share(), times)
