"""How many tokens a rank may bring and how many rows it can receive: agreed once per group, grown only collectively.

`reserve` is for users; `agree` is what a call does at its first gate. Every rank decides from the same published
numbers, so an overflow is the same error on all of them, before any row moves.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from ..errors import CapacityError
from .group import Group, get_group, group_ranks


def default_row_capacity(max_tokens: int, top_k: int) -> int:
    """Rows a rank can receive unless told otherwise: twice its share when every rank brings `max_tokens`."""
    return 2 * max_tokens * top_k


def reserve(group: ProcessGroup | str, max_tokens: int, top_k: int, row_capacity: int = -1) -> tuple[int, int]:
    """Agrees on the capacities of a group; every rank must call it, with its own figures.

    Needed before `torch.compile` (a trace cannot ask the other ranks) and whenever a later batch is larger than the
    first.
    Capacities never shrink. Rows are counted per rank: W * max_tokens * top_k cannot overflow.

    Args:
        group: process group or its `group_name`.
        max_tokens: largest T of this rank; the largest of all ranks is agreed.
        top_k: K, for the default of `row_capacity`.
        row_capacity: rows a rank can receive; -1 for 2 * max_tokens * top_k.

    Returns:
        The agreed (max_tokens, row_capacity).

    Raises:
        ValueError: a figure out of range.
        GroupError: a rank did not come in time.
    """
    if max_tokens < 0:
        raise ValueError(f"reserve: max_tokens: expected at least 0, got {max_tokens}")
    if top_k < 1:
        raise ValueError(f"reserve: top_k: expected at least 1, got {top_k}")
    if row_capacity < -1:
        raise ValueError(f"reserve: row_capacity: expected -1 or at least 0, got {row_capacity}")
    name = group if isinstance(group, str) else group.group_name
    if group_ranks(name) == 1:
        return max_tokens, max_tokens * top_k
    state = get_group(name)
    with state.step("reserve"):
        mine = {"tokens": max_tokens, "top_k": top_k, "rows": row_capacity}
        all_ranks = state.gate("reserve", "route", mine)
        tokens = max(p["tokens"] for p in all_ranks)
        rows = max(default_row_capacity(tokens, p["top_k"]) if p["rows"] < 0 else p["rows"] for p in all_ranks)
        state.max_tokens = max(tokens, state.max_tokens or 0)
        state.row_capacity = max(rows, state.row_capacity or 0)
        return state.max_tokens, state.row_capacity


def rebuild(group: ProcessGroup | str) -> None:
    """Makes a group usable again after a `GroupError`; every rank must call it. Capacities must be agreed anew.

    Raises:
        GroupError: a rank did not come in time (a dead rank cannot come back: make a new process group then).
    """
    name = group if isinstance(group, str) else group.group_name
    if group_ranks(name) > 1:
        get_group(name).rebuild()


def traced_row_capacity(group: Group, asked: int) -> int:
    """The rows that h gets in a trace: `asked`, or the agreed figure.

    Raises:
        CapacityError: nothing is agreed and nothing was asked for.
    """
    if asked >= 0:
        return asked
    if group.row_capacity is None:
        raise CapacityError(
            "dispatch_gemm_combine: row_capacity: expected a number of rows, or a call of "
            f"moe_megakernel.reserve(group, ...) on every rank before compiling, got -1 and "
            f"no agreed capacity of group {group.name}"
        )
    return group.row_capacity


def agree_first(group: Group, payloads: list[dict[str, Any]]) -> None:
    """Takes the capacities from a group's first call (keys tokens, top_k, row_capacity), unless there are some."""
    if group.max_tokens is None or group.row_capacity is None:
        asked = payloads[0]["row_capacity"]
        group.max_tokens = max(p["tokens"] for p in payloads)
        group.row_capacity = default_row_capacity(group.max_tokens, payloads[0]["top_k"]) if asked < 0 else asked


def agree(group: Group, op: str, payloads: list[dict[str, Any]]) -> int | CapacityError:
    """Takes the capacity decision of one call from all ranks' payloads (keys tokens, top_k, row_capacity, sends).

    Returns:
        The rows every rank has in this call, or the error that all ranks must raise.
    """
    tokens = [p["tokens"] for p in payloads]
    asked = payloads[0]["row_capacity"]
    agree_first(group, payloads)
    assert group.max_tokens is not None
    assert group.row_capacity is not None
    advice = "call moe_megakernel.reserve on every rank"
    if max(tokens) > group.max_tokens:
        r = tokens.index(max(tokens))
        return CapacityError(
            f"{op}: x: expected at most {group.max_tokens} tokens on a rank, got {max(tokens)} on rank {r}; {advice}"
        )
    capacity = group.row_capacity if asked < 0 else asked
    if capacity > group.row_capacity:
        return CapacityError(
            f"{op}: row_capacity: expected at most the {group.row_capacity} rows agreed, got {capacity}; {advice}"
        )
    received = [sum(p["sends"][r] for p in payloads) for r in range(group.ranks)]
    if max(received) > capacity:
        r = received.index(max(received))
        return CapacityError(
            f"{op}: row_capacity: expected at most {capacity} rows on a rank, got {received[r]} needed on rank {r}; "
            f"{advice} or pass a larger row_capacity"
        )
    return capacity
