"""What every rank of `benchmarks.ranks` runs: its share of a layer, its bits against one rank's, and times of both.

The ranks share one GPU and split one batch. Rank 0 also runs the whole layer by itself, with as many blocks as all
ranks have together, while the others wait on the host; and each rank a layer of its own, of as many tokens, routes and
experts as its share, beside those of the others: what sharing the GPU costs without any communication.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

import moe_megakernel
from moe_megakernel.bench.implementation import Call
from moe_megakernel.bench.peers.ours import layer_of
from moe_megakernel.bench.problem import LEAVES, Problem, make_problem, share_of
from moe_megakernel.bench.routings import parse_routing
from moe_megakernel.bench.timing import SLEEP_CYCLES, Flush, Times, summary
from moe_megakernel.distributed.partition import expert_range
from moe_megakernel.hopper.launch import device_sms
from moe_megakernel.shapes import benchmark_shapes

from . import report
from .group import Rank
from .sm_share import own_stream

DIRECTIONS = ("forward", "backward")
CACHES = ("cold", "hot")
#: Seconds that a launch waits for other ranks.
TIMEOUT = 60.0


@dataclass(frozen=True)
class Config:
    """letters: of the shapes, T tokens of all ranks; steps: back to back in one sample where caches are hot; own_sms:
    each rank on SMs of its own, else wherever MPS puts it; rest: seconds without work before a sample, so that it does
    not pay in clock rate for the power that the one before took.
    """

    letters: tuple[str, ...]
    routing: str
    backend: str
    transport: str
    caches: tuple[str, ...]
    rounds: int
    steps: int
    own_sms: bool
    rest: float


@dataclass(frozen=True)
class Found:
    """One shape, direction and state of the caches; milliseconds of a step."""

    letter: str
    direction: str
    cache: str
    steps: int
    sms: int  # of a rank
    single: Times  # one rank with the SMs of all
    several: Times  # the last of the ranks
    apart: Times  # the last of the ranks, each with a layer of its own


# -- pure parts --------------------------------------------------------------------------------------------------------


def sms_of_rank(sms: int, ranks: int) -> int:
    """SMs that each rank of a shared GPU gets, in pairs.

    Raises:
        ValueError: there are not enough.
    """
    share = sms // ranks // 2 * 2
    if share < 2:
        raise ValueError(f"ranks: ranks: expected at most {sms // 2} on {sms} SMs, got {ranks}")
    return share


def own_layer(part: Problem) -> Problem:
    """A layer of one rank with the tokens and experts of `part`, whose routes all stay there."""
    experts = len(part.w_gate_up)
    shape = replace(part.shape, num_experts=experts, tokens=part.tokens)
    return replace(part, shape=shape, topk_idx=part.topk_idx % experts, group=None)


def share_of_results(results: list[Tensor], num_experts: int, rank: int, ranks: int) -> list[Tensor]:
    """The same of y and the gradients of `problem.LEAVES`."""
    experts = expert_range(num_experts, rank, ranks)
    by_token, by_expert = results[:3], results[3:]
    return [t.tensor_split(ranks)[rank].clone() for t in by_token] + [
        t[experts.start : experts.stop].clone() for t in by_expert
    ]


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """y [T, H] with its graph, which is kept, and what it is differentiated with respect to."""

    y: Tensor
    leaves: tuple[Tensor, ...]
    dy: Tensor

    def gradients(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.y, self.leaves, self.dy, retain_graph=True)


def forward_of(problem: Problem, config: Config) -> Call:
    """The forward of a problem, by one rank or as a rank of its group, in training mode."""
    options = {} if problem.group is None else {"group_name": problem.group.group_name, "transport": config.transport}
    function = layer_of(problem.topk_idx, problem.shape.num_experts, config.backend, **options)
    return lambda: function(*problem.leaves)


def make_step(problem: Problem, config: Config) -> Step:
    """Of a group: the forward has run on all ranks."""
    return Step(forward_of(problem, config)(), problem.leaves, problem.dy)


def results_of(step: Step) -> list[Tensor]:
    """y and all gradients."""
    return [step.y.detach(), *step.gradients()]


def expected_share(rank: Rank, whole: Problem, config: Config) -> list[Tensor]:
    """This rank's share of what one rank computes. The ranks take turns, so that one at a time has the whole there."""
    share: list[Tensor] = []
    for turn in range(rank.ranks):
        if turn == rank.rank:
            results = results_of(make_step(whole, config))
            share = share_of_results(results, whole.shape.num_experts, rank.rank, rank.ranks)
            del results
            moe_megakernel.check_errors()
            moe_megakernel.release_workspaces()
            free_memory(rank.device)
        rank.meet()
    return share


def check_bits(rank: Rank, step: Step, expected: list[Tensor]) -> None:
    """Compares y and all gradients of this rank with what one rank computes.

    Raises:
        RuntimeError: a bit differs.
    """
    for name, found, want in zip(("y", *LEAVES), results_of(step), expected, strict=True):
        wrong = int((found.view(torch.uint8) != want.view(torch.uint8)).sum())
        if wrong:
            what = "y" if name == "y" else f"gradient of {name}"
            raise RuntimeError(f"ranks: rank {rank.rank}: {what}: expected one rank's bits, got {wrong} other bytes")
    moe_megakernel.check_errors()


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# -- times -------------------------------------------------------------------------------------------------------------


def time_steps(call: Call, steps: int, flush: Flush | None, start: Callable[[], None]) -> float:
    """Milliseconds of one of `steps` calls back to back, from `start` on the device to the end of the last one."""
    call()  # what the other way to run left behind, workspace or clock, is not part of it
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush()
    torch.cuda._sleep(SLEEP_CYCLES)
    start()
    begin.record()
    for _ in range(steps):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps


class Timer:
    """Times one rank and several in turn. Every rank calls `measure` in the same order."""

    def __init__(self, rank: Rank, config: Config, sms: int, all_sms: torch.cuda.Stream) -> None:
        self._rank, self._config, self._sms, self._all_sms = rank, config, sms, all_sms
        # Kept, because the barrier lives in its memory.
        self._shared = symmetric.empty(16, dtype=torch.int32, device=rank.device)
        self._handle = symmetric.rendezvous(self._shared, rank.group)
        self._flush = Flush()

    def measure(self, single: Call | None, several: Call, apart: Call, cache: str) -> tuple[int, Times, Times, Times]:
        """Steps of a sample, times of `single`, which rank 0 has, and of the last rank to end `several` and `apart`."""
        flush = self._flush if cache == "cold" else None
        # Cold caches stay cold for one step only.
        steps = 1 if flush is not None else self._config.steps
        alone: list[float] = []
        together: list[float] = []
        beside: list[float] = []
        for _ in range(self._config.rounds + 1):
            if single is not None:
                moe_megakernel.set_num_sms(self._sms * self._rank.ranks)
                with torch.cuda.stream(self._all_sms):
                    alone.append(self._sample(single, steps, flush, lambda: None))
                moe_megakernel.set_num_sms(self._sms)
            self._rank.meet()
            together.append(self._sample(several, steps, flush, self._start))
            self._rank.meet()
            beside.append(self._sample(apart, steps, flush, self._start))
            self._rank.meet()
        moe_megakernel.check_errors()
        # The first round warms up.
        by_rank = self._rank.gather((alone[1:], together[1:], beside[1:]))
        last = [[max(spans) for spans in zip(*(of[i] for of in by_rank), strict=True)] for i in (1, 2)]
        return steps, summary(by_rank[0][0]), summary(last[0]), summary(last[1])

    def _sample(self, call: Call, steps: int, flush: Flush | None, start: Callable[[], None]) -> float:
        time.sleep(self._config.rest)
        return time_steps(call, steps, flush, start)

    def _start(self) -> None:
        self._handle.barrier(0, int(TIMEOUT * 1000))


def measure(rank: Rank, config: Config, commit: str) -> tuple[dict[str, str], list[Found]]:
    """Where it ran, and what came out; the same on every rank."""
    moe_megakernel.set_timeout(TIMEOUT)
    sms = sms_of_rank(device_sms(torch.cuda.current_device()), rank.ranks)
    moe_megakernel.set_num_sms(sms)
    all_sms = torch.cuda.current_stream()
    if config.own_sms:
        torch.cuda.set_stream(own_stream(rank.rank, rank.ranks, sms))
    timer = Timer(rank, config, sms, all_sms)
    found = []
    for letter in config.letters:
        found += _measure_shape(rank, config, timer, letter, sms, all_sms)
        free_memory(rank.device)
        rank.meet()
    return report.machine(commit), found


def _measure_shape(
    rank: Rank, config: Config, timer: Timer, letter: str, sms: int, all_sms: torch.cuda.Stream
) -> list[Found]:
    whole: Any = make_problem(benchmark_shapes()[letter], parse_routing(config.routing))  # the same on every rank
    expected: Any = expected_share(rank, whole, config)
    part = share_of(whole, rank.rank, rank.ranks, rank.group)
    moe_megakernel.reserve(rank.group, part.tokens, part.shape.top_k, part.most_rows)
    single: dict[str, Call | None] = dict.fromkeys(DIRECTIONS)
    if rank.rank == 0:
        torch.cuda.synchronize()
        with torch.cuda.stream(all_sms):  # backward follows on the same stream
            whole_step = make_step(whole, config)
        torch.cuda.synchronize()
        single = {"forward": forward_of(whole, config), "backward": lambda: whole_step.gradients()[0]}
    else:
        whole = None
        free_memory(rank.device)
    step = make_step(part, config)
    check_bits(rank, step, expected)
    expected = None
    several: dict[str, Call] = {"forward": forward_of(part, config), "backward": lambda: step.gradients()[0]}
    own = own_layer(part)
    own_step = make_step(own, config)
    apart: dict[str, Call] = {"forward": forward_of(own, config), "backward": lambda: own_step.gradients()[0]}
    results = []
    for direction in DIRECTIONS:
        for cache in config.caches:
            steps, *times = timer.measure(single[direction], several[direction], apart[direction], cache)
            results.append(Found(letter, direction, cache, steps, sms, *times))
    rank.meet()
    return results
