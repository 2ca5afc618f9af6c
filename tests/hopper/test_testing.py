"""The hooks that tests set on launches: what a launch gets while a context is open, and that nothing stays."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from moe_megakernel.hopper import launch
from moe_megakernel.hopper.launch import LaunchHooks, LaunchSizes
from moe_megakernel.hopper.testing import RECORD_WORDS, fault, logged, most_records
from moe_megakernel.plan_names import Counter, Direction

CPU = torch.device("cpu")
SIZES = LaunchSizes(20, 2, 4, 64, 64, True, False, 8)


def find(direction: Direction = Direction.FORWARD) -> LaunchHooks:
    assert launch.find_hooks is not None
    return launch.find_hooks(direction, SIZES, CPU, None)


def test_a_fault_is_that_of_the_innermost_context() -> None:
    assert launch.find_hooks is None
    with fault(Counter.X_READY, 3):
        assert find() == (None, Counter.X_READY, 3)
        with fault(Counter.PEER_DONE, 0):
            assert find() == (None, Counter.PEER_DONE, 0)
        assert find() == (None, Counter.X_READY, 3)
    assert launch.find_hooks is None


def test_every_launch_has_a_log_of_its_own() -> None:
    with logged() as logs:
        hooks = [find() for _ in range(3)]
        assert [h.log for h in hooks] == logs
        assert {(h.skip_counter, h.skip_index) for h in hooks} == {(-1, 0)}
        with fault(Counter.A_READ, 1):
            both = find()
        assert both.log is logs[3]
        assert both.skip_counter == Counter.A_READ
        assert launch.find_hooks is not None
    assert launch.find_hooks is None
    assert len({log.data_ptr() for log in logs}) == 4
    for log in logs:
        assert log.dtype == torch.int64
        assert len(log) == 1 + RECORD_WORDS * most_records(SIZES)
        assert not log.any()


def test_a_direction_has_its_own_hooks() -> None:
    nothing = LaunchHooks()
    with fault(Counter.DH_READY, 1, Direction.BACKWARD), fault(Counter.A_READY, 2), logged() as logs:
        assert find(Direction.BACKWARD) == (None, Counter.DH_READY, 1)
        assert find() == (logs[0], Counter.A_READY, 2)
    with logged(Direction.BACKWARD):
        assert find() == nothing
    with fault(Counter.X_READY, 0):
        assert find(Direction.BACKWARD) == nothing


def test_an_error_inside_leaves_no_hook() -> None:
    def fail(context: Callable[[], object]) -> None:
        context()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), fault(Counter.A_READY, 0), logged():
        fail(find)
    assert launch.find_hooks is None


def test_launches_of_other_threads_are_meant_too() -> None:
    found: list[LaunchHooks] = []
    with logged() as logs:
        thread = threading.Thread(target=lambda: found.append(find()))
        thread.start()
        thread.join()
    assert [h.log for h in found] == logs
