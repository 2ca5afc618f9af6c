"""Hooks for tests of the fused kernels: a signal that is left out, the log of a launch, and the plan that it follows.

Nothing here is needed to run a layer. Hooks hold for all launches of one direction of this process while a context is
open, in every thread, and contexts nest; launches of a CUDA graph have those of its capture. Used by `tests/gpu`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import _native
from ..plan import ROW_TILE, PlanConfig
from ..plan_names import Counter, Direction
from . import launch
from .launch import LaunchHooks, LaunchSizes, PeerCall, num_sms_for

#: int64 words of a record of the log, `LogRecord` in `plan/log.h`.
RECORD_WORDS = 5
#: Most waits, and most raises, of one role in one task: Waits and Raises in `plan/dependencies.h`.
MOST_WAITS = 4
#: More than the blocks and warps of a launch's kernels that wait for the plan, for each SM.
STARTS_OF_SM = 16
#: Columns of a tile of a bias gradient, kBiasColumns in `plan/tasks.h`.
BIAS_COLUMNS = 256
#: Records of the plan task: "ready" raised and seen, "plan ready" raised.
PLAN_RECORDS = 3

_lock = threading.Lock()
_faults: list[tuple[Direction, Counter, int]] = []
_logs: list[tuple[Direction, list[Tensor]]] = []


def plan_config(
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    width: int,
    gated: bool,
    staged: bool,
    num_sms: int | None = None,
    direction: Direction = Direction.FORWARD,
) -> PlanConfig:
    """The plan's configuration that a launch of one rank takes, rings as they are.

    Args:
        tokens, top_k, num_experts, hidden, width: T, K, E, H, I, each at least 1.
        gated: w_gate_up has 2I rows, else I.
        staged: the backend is "staged", else "mega".
        num_sms: blocks at most, even; None for what a launch on the current CUDA device takes.
        direction: of the launch.

    Raises:
        RuntimeError: without the native library; or `moe::hopper_..plan_config: argument: expected ..., got ...`.
    """
    if not _native.load():
        raise RuntimeError(f"plan_config: native library: expected it loaded, got {_native.why_missing()}")
    sms = num_sms_for(torch.cuda.current_device()) if num_sms is None else num_sms
    forward = direction == Direction.FORWARD
    op = torch.ops.moe.hopper_plan_config if forward else torch.ops.moe.hopper_backward_plan_config
    values = op(tokens, top_k, num_experts, hidden, width, gated, staged, sms)
    return PlanConfig.from_values(values.tolist())


def group_plan_config(
    sizes: LaunchSizes,
    *,
    num_ranks: int,
    rank: int,
    max_tokens: int,
    row_capacity: int,
    direction: Direction = Direction.FORWARD,
) -> PlanConfig:
    """The same of a launch of one rank of a group.

    Args:
        sizes: of the layer; its tokens do not matter.
        num_ranks, rank: W and this rank.
        max_tokens, row_capacity: as the group has agreed.
        direction: of the launch.

    Raises:
        RuntimeError: as `plan_config`.
    """
    if not _native.load():
        raise RuntimeError(f"group_plan_config: native library: expected it loaded, got {_native.why_missing()}")
    group = (num_ranks, row_capacity, rank, direction == Direction.BACKWARD)
    values = torch.ops.moe.hopper_group_plan_config(max_tokens, *sizes[1:], *group)
    return PlanConfig.from_values(values.tolist())


def config_of_call(peer: PeerCall, sizes: LaunchSizes, direction: Direction) -> PlanConfig:
    """`group_plan_config` of a launch with this argument `peer`."""
    ranks, rank, tokens, rows = peer.group[:4].tolist()
    return group_plan_config(
        sizes, num_ranks=ranks, rank=rank, max_tokens=tokens, row_capacity=rows, direction=direction
    )


def most_records(sizes: LaunchSizes, direction: Direction = Direction.FORWARD, peer: PeerCall | None = None) -> int:
    """Records that no log of such a launch exceeds, whatever the routing and the gradients asked for."""
    if peer is None:
        config = plan_config(**sizes._asdict(), direction=direction)
    else:
        config = config_of_call(peer, sizes, direction)
    problem, tiling, ranks = config.problem, config.tiling, config.problem.num_ranks
    backward = direction == Direction.BACKWARD
    routes = problem.row_capacity
    row_tiles = routes // ROW_TILE + min(problem.num_experts, routes)
    columns = -(-problem.width // tiling.act_columns) + -(-problem.hidden // tiling.hidden_columns)
    sources = 1
    parameter_tiles = 0
    if backward:
        columns += -(-problem.width // tiling.dgrad_columns) + 1  # gate_up is h computed again; the one is dS
        sources = 2
        parameter_tiles = problem.num_experts * _parameter_tiles(config)
    of_task = 1 + 2 * (3 * MOST_WAITS)  # the claim; for each block, waits of load and of compute, and raises
    of_piece = 1 + 2 * MOST_WAITS
    of_combine = 1 + ranks  # the claim, and the waits for "done" of all ranks
    close_and_drain = 2 * (of_task + 2 * ranks)
    return (
        PLAN_RECORDS * ranks
        + STARTS_OF_SM * sizes.num_sms
        + (row_tiles * columns + parameter_tiles) * of_task
        + close_and_drain
        + sources * row_tiles * (ROW_TILE // tiling.piece_rows) * of_piece
        + -(-sizes.tokens // tiling.combine_tokens) * of_combine
    )


def _parameter_tiles(config: PlanConfig) -> int:
    """Tiles of the gradients of one expert's weights and biases."""
    problem, tiling = config.problem, config.tiling
    h_columns = problem.width * (2 if problem.gated else 1)
    weights = ((problem.hidden, problem.width), (h_columns, problem.hidden))
    tiles = sum(-(-rows // tiling.wgrad_rows) * -(-columns // tiling.wgrad_columns) for rows, columns in weights)
    return tiles + sum(-(-columns // BIAS_COLUMNS) for columns in (problem.hidden, h_columns))


@contextmanager
def fault(counter: Counter, index: int, direction: Direction = Direction.FORWARD) -> Iterator[None]:
    """Leaves out, in launches inside, every raise of one element of a counter; the innermost of several holds.

    The launch then runs into the timeout (`moe_megakernel.set_timeout`) unless nobody waits for that element.

    Args:
        counter: whose raises; not `PLAN_READY`, which another kernel raises.
        index: of the element; for `PEER_DONE` the rank.
        direction: which launches are meant.
    """
    with _lock:
        _faults.append((direction, counter, index))
        launch.set_find_hooks(_find_hooks)
    try:
        yield
    finally:
        with _lock:
            _faults.pop()
            _uninstall()


@contextmanager
def logged(direction: Direction = Direction.FORWARD) -> Iterator[list[Tensor]]:
    """Yields a list to which every launch of one direction inside appends its log, in the order of the calls.

    A log is int64 on the launch's device: the number of records, then room for `most_records` of `RECORD_WORDS` words
    each, `LogRecord` of `plan/log.h`. It is complete when the launch has run: synchronise before reading.
    """
    logs: list[Tensor] = []
    with _lock:
        _logs.append((direction, logs))
        launch.set_find_hooks(_find_hooks)
    try:
        yield logs
    finally:
        with _lock:
            _logs.pop()
            _uninstall()


def _uninstall() -> None:
    if not _faults and not _logs:
        launch.set_find_hooks(None)


def _find_hooks(direction: Direction, sizes: LaunchSizes, device: torch.device, peer: PeerCall | None) -> LaunchHooks:
    with _lock:
        faults = [(counter, index) for meant, counter, index in _faults if meant == direction]
        open_logs = [logs for meant, logs in _logs if meant == direction]
        counter, index = faults[-1] if faults else (-1, 0)
        log = None
        if open_logs:
            log = torch.zeros(1 + RECORD_WORDS * most_records(sizes, direction, peer), dtype=torch.int64, device=device)
            open_logs[-1].append(log)
    return LaunchHooks(log, int(counter), index)
