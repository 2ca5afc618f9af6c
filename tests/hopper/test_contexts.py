"""When calls may go without Python: what a context holds, and everything that forgets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hopper.test_forward import launches, make_call  # noqa: F401  (a fixture)

from moe_megakernel import config, contexts, errors, inner_ops, release_workspaces
from moe_megakernel.errors import MoEError
from moe_megakernel.hopper import device_status, forward, launch, testing, workspaces
from moe_megakernel.plan_names import Counter

STREAM = 7


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the library keeps now; each context is (workspace, status, stream, num_sms, timeout_ns)."""
    contexts.forget()
    now: list[Any] = []
    monkeypatch.setattr(torch.ops.moe, "hopper_keep_context", lambda *context: now.append(context), raising=False)
    monkeypatch.setattr(torch.ops.moe, "hopper_forget_contexts", now.clear, raising=False)
    yield now
    contexts.forget()


def workspace() -> Any:
    return SimpleNamespace(device=SimpleNamespace(index=0))


def keep(space: Any, status: Any = None, stream: int = STREAM, num_sms: int = 132, timeout_ns: int = 5) -> None:
    contexts.keep(contexts.generation(), space, status, stream, num_sms, timeout_ns)


def test_the_same_is_kept_once(kept: list[Any]) -> None:
    space = workspace()
    keep(space)
    keep(space)
    assert kept == [(space, None, STREAM, 132, 5)]


@pytest.mark.parametrize("changed", [{"status": 1}, {"num_sms": 64}, {"timeout_ns": 6}, {"stream": 8}])
def test_what_has_changed_is_kept_again(kept: list[Any], changed: dict[str, Any]) -> None:
    space = workspace()
    keep(space)
    keep(space, **changed)
    assert len(kept) == 2


def test_another_workspace_is_kept_again(kept: list[Any]) -> None:
    keep(workspace())
    keep(workspace())
    assert len(kept) == 2


def test_nothing_is_kept_of_what_was_read_before_a_change(kept: list[Any]) -> None:
    before = contexts.generation()
    contexts.forget()
    contexts.keep(before, workspace(), None, STREAM, 132, 5)
    assert not kept


def test_memory_released_for_more_is_no_change(kept: list[Any]) -> None:
    before = contexts.generation()
    keep(workspace())
    contexts.release()
    assert not kept
    contexts.keep(before, workspace(), None, STREAM, 132, 5)
    assert len(kept) == 1


def _with_fault() -> None:
    with testing.fault(Counter.X_READY, 0):
        pass


def _another_group() -> None:
    device_status.add_group_record(device_status.StatusRecord(torch.device("cpu"), torch.zeros(16).long()))


FORGETS: dict[str, Callable[[], None]] = {
    "timeout": lambda: config.set_timeout(3.0),
    "num_sms": lambda: config.set_num_sms(64),
    "memory given back": release_workspaces,
    "memory in disorder": lambda: workspaces.drop_workspaces(0),
    "an error of an earlier step": lambda: errors.defer(torch.device("cpu"), MoEError("late")),
    "hooks": _with_fault,
    "a group": _another_group,
}


@pytest.mark.parametrize("change", FORGETS)
def test_what_makes_contexts_wrong_forgets_them(kept: list[Any], monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    for name in ("_timeout", "_num_sms"):
        monkeypatch.setattr(config, name, getattr(config, name))
    monkeypatch.setattr(errors, "_pending", {})
    keep(workspace())
    FORGETS[change]()
    assert not kept


def test_hooks_forget_when_they_come_and_when_they_go(kept: list[Any]) -> None:
    with testing.logged():
        keep(workspace())
    assert not kept
    assert launch.find_hooks is None


class TestForward:
    """Which calls through Python leave a context."""

    @pytest.fixture(autouse=True)
    def on_a_device(self, launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(forward, "capturing", lambda: False)
        monkeypatch.setattr(forward, "current_stream", lambda index: STREAM)
        monkeypatch.setattr(device_status, "_group_records", set())

    def test_an_ordinary_one(self, kept: list[Any]) -> None:
        inner_ops._forward(*make_call())
        ((space, status, *rest),) = kept
        assert space.numel() == 1005
        assert status.numel() == 16
        assert rest == [STREAM, 132, 2_500_000_000]

    def test_none_under_capture(self, kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forward, "capturing", lambda: True)
        inner_ops._forward(*make_call())
        assert not kept

    def test_none_with_hooks(self, kept: list[Any]) -> None:
        with testing.fault(Counter.X_READY, 0):
            inner_ops._forward(*make_call())
            assert not kept

    def test_none_beside_a_group(self, kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_status, "_group_records", {1})
        monkeypatch.setattr(inner_ops, "raise_pending", lambda device: None)
        inner_ops._forward(*make_call())
        assert not kept

    def test_none_of_a_part_of_another_call(self, kept: list[Any]) -> None:
        forward.layer_forward(*make_call())
        assert not kept

    def test_none_where_an_error_came_meanwhile(self, kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inner_ops, "raise_pending", lambda device: contexts.forget())
        inner_ops._forward(*make_call())
        assert not kept
