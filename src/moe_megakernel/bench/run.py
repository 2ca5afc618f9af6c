"""The benchmark itself: problem after problem, all implementations on each, numbers before times.

An implementation that is absent, fails or is wrong is left out with its reason; the others go on. With several ranks
that needs all of them to fail: one that fails alone inside a collective call says so and ends the run.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..shapes import Shape, find_shape
from . import modes, records
from .expected import Expected, check_numbers, make_expected
from .faults import one_line
from .implementation import Bound, Call, Implementation, Yardstick, prepared
from .memory import Memory, measure_memory
from .peers import IMPLEMENTATIONS
from .problem import Problem, make_problem, share_of
from .routings import Routing
from .timing import CallError, Times, host_time, naming, time_rounds

#: Rounds in which the variants of an implementation are compared.
VARIANT_ROUNDS = 5
UNMEASURED = Memory(-1, -1, -1)


@dataclass(frozen=True)
class Options:
    """What to measure. tokens: of each rank, by default the shape's own; impls: names in `peers.IMPLEMENTATIONS`."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    routings: tuple[Routing, ...]
    directions: tuple[str, ...]
    modes: tuple[str, ...]
    impls: tuple[str, ...]
    rounds: int
    cold: bool
    memory: bool
    host: bool
    device: torch.device
    seed: int
    commit: str
    command: str


class Absent(NamedTuple):
    """Why an implementation, or one variant, is not among the rows of a problem (and a mode, or all of them).

    fault: it should be.
    """

    impl: str
    mode: str
    reason: str
    fault: bool


@dataclass
class Measured:
    """All of one problem. rows: of rank 0 for the slowest rank."""

    problem: Problem
    rows: list[records.Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    memory: dict[tuple[str, str], Memory] = field(default_factory=dict)  # by implementation and variant


@dataclass
class _Candidate:
    """An implementation that is bound and right."""

    implementation: Implementation
    bound: Bound | Yardstick
    variant: str
    error: float
    memory: Memory = UNMEASURED


_Calls = dict[str, tuple[_Candidate, Call]]


def run(options: Options, group: dist.ProcessGroup | None = None) -> Iterator[Measured]:
    """Measures every shape, number of tokens and routing.

    Args:
        group: of the ranks, where there are several; all of them call this.
    """
    for slug in options.shapes:
        shape = find_shape(slug, "bench")
        for tokens in options.tokens or (shape.tokens,):
            for routing in options.routings:
                yield _measure(shape, routing, tokens, options, group)
                gc.collect()
                if options.device.type == "cuda":
                    torch.cuda.empty_cache()


def _measure(
    shape: Shape, routing: Routing, tokens: int | None, options: Options, group: dist.ProcessGroup | None
) -> Measured:
    ranks = 1 if group is None else group.size()
    count = None if tokens is None else tokens * ranks
    whole = make_problem(shape, routing, count, options.device, options.seed)
    if group is None:
        problem, expected = whole, make_expected(whole)
    else:
        rank = group.rank()
        problem, expected = share_of(whole, rank, ranks, group), make_expected(whole, rank, ranks)
    del whole
    measured = Measured(problem)
    for mode in options.modes:
        candidates = list(_candidates(measured, expected, mode, options))
        for direction in options.directions:
            measured.rows += _rows(measured, candidates, direction, mode, options)
    return measured


def _candidates(measured: Measured, expected: Expected, mode: str, options: Options) -> Iterator[_Candidate]:
    problem = measured.problem
    for name in options.impls:
        implementation = IMPLEMENTATIONS[name]
        reason = implementation.absent(problem)
        if reason:
            if mode == options.modes[0]:
                measured.absent.append(Absent(name, "", reason, False))
            continue
        reason = modes.mode_fault(implementation, mode, problem.device)
        if reason:
            measured.absent.append(Absent(name, mode, reason, False))
            continue
        check = partial(_checked, implementation, measured, expected, mode, options)
        found, fault = _everywhere(problem, name, check)
        if fault:
            measured.absent.append(Absent(name, mode, fault, True))
        else:
            yield from found


def _everywhere(problem: Problem, name: str, measure: Callable[[], Any]) -> tuple[Any, str]:
    """What `measure` returns, and the first fault of any rank, so that all of them leave it out."""
    found, fault = None, ""
    try:
        found = measure()
    except Exception as error:  # of any peer, on any problem: it is left out, and named
        fault = _fault_here(problem, name, error)
    if fault:
        _free_memory(problem.device)
    faults = _gathered(problem, fault)
    return found, next((text for text in faults if text), "")


def _gathered(problem: Problem, value: Any) -> list[Any]:
    if problem.group is None:
        return [value]
    values: list[Any] = [None] * problem.ranks
    dist.all_gather_object(values, value, group=problem.group)
    return values


def _checked(
    implementation: Implementation, measured: Measured, expected: Expected, mode: str, options: Options
) -> list[_Candidate]:
    """One candidate for each variant. Its numbers are right in this mode."""
    problem = measured.problem
    candidates = []
    for variant in implementation.variants or ("",):
        bound = implementation.bind(problem, variant)
        error = 0.0
        memory = UNMEASURED
        if isinstance(bound, Bound):
            found = modes.results(bound, problem.dy, mode)
            error = max(check_numbers(expected, found).values())
            implementation.check()
            del found
            if options.memory:  # of eager steps, whatever the mode
                key = (implementation.name, variant)
                if key not in measured.memory:
                    measured.memory[key] = measure_memory(bound, problem)
                memory = measured.memory[key]
        candidates.append(_Candidate(implementation, bound, variant, error, memory))
    return candidates


def _rows(
    measured: Measured, candidates: list[_Candidate], direction: str, mode: str, options: Options
) -> list[records.Row]:
    problem = measured.problem
    calls: _Calls = {}
    faults: dict[str, str] = {}
    for candidate in candidates:
        key = f"{candidate.implementation.name} {candidate.variant}".strip()
        made, fault = _everywhere(problem, key, partial(_called, candidate, problem, direction, mode))
        if fault:
            faults[key] = fault
        else:
            calls[key] = (candidate, made)
    chosen = _fastest(calls, faults, problem, options)
    times = _timed(chosen, faults, problem, options, options.rounds)
    for key, fault in faults.items():
        name, _, variant = key.partition(" ")
        measured.absent.append(Absent(name, mode, f"{direction}{variant and f', {variant}'}: {fault}", True))
    return [_row(problem, chosen[name][0], times, name, direction, mode, options) for name in times]


def _called(candidate: _Candidate, problem: Problem, direction: str, mode: str) -> Call:
    """Run twice, so that what fails at the first call or does not repeat fails here."""
    call = modes.make_call(candidate.bound, problem, direction, mode)
    for _ in range(2):
        prepared(call)
    if problem.device.type == "cuda":
        torch.cuda.synchronize()
    candidate.implementation.check()
    return call


def _fastest(calls: _Calls, faults: dict[str, str], problem: Problem, options: Options) -> _Calls:
    """By name of the implementation: of its variants the fastest one."""
    by_name: dict[str, _Calls] = {}
    for key, (candidate, call) in calls.items():
        by_name.setdefault(candidate.implementation.name, {})[key] = (candidate, call)
    chosen = {}
    for name, variants in by_name.items():
        best = next(iter(variants))
        if len(variants) > 1:
            times = _timed(variants, faults, problem, options, min(VARIANT_ROUNDS, options.rounds), host=False)
            if not times:
                continue
            best = min(times, key=lambda key: times[key].median)
        chosen[name] = variants[best]
    return chosen


def _timed(
    calls: _Calls, faults: dict[str, str], problem: Problem, options: Options, rounds: int, host: bool = True
) -> dict[str, Times]:
    """Times of calls, of all ranks the slowest's. What fails goes to `faults`, by key, and the others begin again."""
    left = dict(calls)
    while True:
        times, failed = {}, None
        try:
            times = _time_together(left, options, rounds, host and options.host)
        except CallError as error:
            failed = error.name, _fault_here(problem, error.name, error.__cause__ or error)
        if failed:
            _free_memory(problem.device)
        everywhere = _gathered(problem, (times, failed))
        failures = dict(fault for _, fault in everywhere if fault)
        if not failures:
            return {key: max(of[key] for of, _ in everywhere) for key in left}
        for key, fault in failures.items():
            faults[key] = fault
            del left[key]


def _time_together(calls: _Calls, options: Options, rounds: int, host: bool) -> dict[str, Times]:
    device = options.device
    times = time_rounds({key: call for key, (_, call) in calls.items()}, rounds, device, options.cold)
    for key, (candidate, call) in calls.items():
        with naming(key):
            if host:
                times[key] = times[key]._replace(host=host_time(call, device))
            candidate.implementation.check()
    return times


def _fault_here(problem: Problem, name: str, error: BaseException) -> str:
    """An error in one line. A rank says it before the others hear of it: they may wait for it in the same call."""
    fault = one_line(error)
    if problem.group is not None:
        print(f"bench: rank {problem.group.rank()}: {name}: {fault}", file=sys.stderr, flush=True)
    return fault


def _free_memory(device: torch.device) -> None:
    """After a failure, once nothing holds its frames any more: it may have run out of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(
    problem: Problem,
    candidate: _Candidate,
    times: dict[str, Times],
    name: str,
    direction: str,
    mode: str,
    options: Options,
) -> records.Row:
    shape, spent = problem.shape, times[name]
    routes_share = problem.routes / problem.topk_idx.numel()
    dense = times.get("dense")
    return records.Row(
        **records.machine(problem.device, options.commit),
        shape=shape.slug,
        T=problem.tokens,
        H=shape.hidden,
        I=shape.width,
        E=shape.num_experts,
        K=shape.top_k,
        ranks=problem.ranks,
        routing=problem.routing.name,
        direction=direction,
        mode=mode,
        cache="cold" if options.cold else "hot",
        impl=name,
        variant=candidate.variant,
        version=candidate.implementation.version(),
        rounds=options.rounds,
        ms_median=spent.median,
        ms_min=spent.least,
        ms_max=spent.most,
        tflops=shape.flops(problem.tokens, direction) * routes_share / spent.median / 1e9,
        ratio_dense=dense.median / spent.median if dense is not None else 0.0,
        error=candidate.error,
        host_us=spent.host,
        saved_bytes=candidate.memory.saved,
        workspace_bytes=candidate.memory.workspace,
        peak_bytes=candidate.memory.peak,
        command=options.command,
    )
