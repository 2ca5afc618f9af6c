"""What launches of the fused kernels have in common, forward and backward: sizes, SMs, timeout, and hooks of tests.

Every figure that does not change from call to call is kept, because a small layer takes no longer than the host's part
of a call. Called by `hopper.forward` and `hopper.backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import contexts
from ..config import get_num_sms, get_timeout
from ..plan_names import Direction

P = ParamSpec("P")
R = TypeVar("R")


class LaunchSizes(NamedTuple):
    """What a launch's memory depends on: T, K, E, H, I, rows of w_gate_up (2I or I), backend, SMs."""

    tokens: int
    top_k: int
    num_experts: int
    hidden: int
    width: int
    gated: bool
    staged: bool
    num_sms: int


class PeerCall(NamedTuple):
    """What a launch of several ranks takes beside what one rank's takes, made by `hopper.peer`.

    group: int64 [8], see `peer_memory.PeerMemory.numbers`. workspace, status: of the group, not of the device.
    """

    group: Tensor
    workspace: Tensor
    status: Tensor
    row_capacity: int


class LaunchHooks(NamedTuple):
    """The arguments of `hopper.ops` that only tests fill in."""

    log: Tensor | None = None
    skip_counter: int = -1
    skip_index: int = 0


NO_HOOKS = LaunchHooks()
FindHooks = Callable[[Direction, LaunchSizes, torch.device, PeerCall | None], LaunchHooks]
#: Asked for the hooks of every launch on a device, or None.
find_hooks: FindHooks | None = None


def set_find_hooks(find: FindHooks | None) -> None:
    """Sets who is asked for the hooks of launches from now on: `hopper.testing`, or nobody."""
    global find_hooks
    find_hooks = find
    contexts.forget()


def hooks_for(
    direction: Direction,
    sizes: tuple[int, int, int, int, int, bool, bool, int],
    device: torch.device,
    peer: PeerCall | None = None,
) -> LaunchHooks:
    """The hooks of one launch; `sizes` are the fields of `LaunchSizes`, of a group with this rank's tokens."""
    find = find_hooks  # once: another thread may take it away
    return NO_HOOKS if find is None else find(direction, LaunchSizes(*sizes), device, peer)


@cache
def device_sms(index: int) -> int:
    """SMs of a CUDA device, rounded down to pairs."""
    return torch.cuda.get_device_properties(index).multi_processor_count // 2 * 2


def num_sms_for(index: int) -> int:
    """SMs that a launch on the device takes at most: those of `set_num_sms`, as far as there are so many."""
    asked, available = get_num_sms(), device_sms(index)
    return available if asked is None else min(asked, available)


def timeout_ns() -> int:
    """Nanoseconds that a wait of a launch may take."""
    return int(get_timeout() * 1e9)


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, called with the device of its first argument, a tensor, as the current one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device = args[0].device  # type: ignore[attr-defined]
        if device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call
