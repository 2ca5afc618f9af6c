"""When a workspace is kept, grown, made anew or dropped. The CPU stands in for the device."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moe_megakernel
from moe_megakernel.hopper import workspaces
from moe_megakernel.hopper.workspaces import ZEROED_BYTES, drop_workspaces, get_workspace, workspaces_bytes


@pytest.fixture(autouse=True)
def device_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the device would say: its current stream, and whether a graph is captured."""
    state = SimpleNamespace(stream=0, capturing=False)
    monkeypatch.setattr(workspaces, "current_stream", lambda index: state.stream)
    monkeypatch.setattr(workspaces, "capturing", lambda: state.capturing)
    monkeypatch.setattr(workspaces, "_allocate", lambda size, device: torch.full((size,), 9, dtype=torch.uint8))
    moe_megakernel.release_workspaces()
    yield state
    moe_megakernel.release_workspaces()


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


def test_one_for_each_device_and_stream(device_state: SimpleNamespace) -> None:
    one = get_workspace(FIRST, 100)
    assert get_workspace(FIRST, 100) is one
    assert get_workspace(FIRST, 1) is one
    other_device = get_workspace(SECOND, 100)
    device_state.stream = 7
    other_stream = get_workspace(FIRST, 100)
    assert len({t.data_ptr() for t in (one, other_device, other_stream)}) == 3
    assert workspaces_bytes() == 300
    device_state.stream = 0
    assert get_workspace(FIRST, 100) is one


@pytest.mark.parametrize("capturing", [False, True])
def test_only_the_first_bytes_are_zeroed(device_state: SimpleNamespace, capturing: bool) -> None:
    """A captured graph does it at every replay; all of a large workspace would take longer than a small layer."""
    device_state.capturing = capturing
    workspace = get_workspace(FIRST, 3 * ZEROED_BYTES)
    assert not workspace[:ZEROED_BYTES].any()
    assert bool((workspace[ZEROED_BYTES:] == 9).all())


def test_zeroed_bytes_are_those_of_the_header() -> None:
    header = Path(__file__).resolve().parents[2] / "kernels/include/moe/plan/layout.h"
    assert re.findall(r"kZeroedBytes = (\d+);", header.read_text()) == [str(ZEROED_BYTES)]


def test_it_grows_and_never_shrinks() -> None:
    small = get_workspace(FIRST, 100)
    small.fill_(1)
    large = get_workspace(FIRST, 200)
    assert large is not small
    assert large.numel() == 200
    assert not large.any(), "a new workspace begins with zeros"
    assert get_workspace(FIRST, 100) is large
    assert workspaces_bytes() == 200


def test_the_smaller_one_is_gone_before_the_larger_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward share it, and the first backward of a step makes it grow."""
    small = weakref.ref(get_workspace(FIRST, 100))
    gone: list[bool] = []
    allocate = workspaces._allocate
    monkeypatch.setattr(workspaces, "_allocate", lambda *a: (gone.append(small() is None), allocate(*a))[1])
    assert get_workspace(FIRST, 50) is small()
    get_workspace(FIRST, 200)
    assert gone == [True]


def test_a_capture_gets_one_of_its_own_that_is_not_kept(device_state: SimpleNamespace) -> None:
    kept = get_workspace(FIRST, 100)
    device_state.capturing = True
    one, two = get_workspace(FIRST, 100), get_workspace(FIRST, 100)
    assert len({t.data_ptr() for t in (kept, one, two)}) == 3
    device_state.capturing = False
    assert get_workspace(FIRST, 100) is kept
    assert workspaces_bytes() == 100


def test_release_and_drop() -> None:
    one, other = get_workspace(FIRST, 100), get_workspace(SECOND, 100)
    drop_workspaces(0)
    assert get_workspace(SECOND, 100) is other
    assert get_workspace(FIRST, 100) is not one
    moe_megakernel.release_workspaces()
    assert workspaces_bytes() == 0
    assert get_workspace(SECOND, 100) is not other


def test_threads_on_one_stream_end_with_the_same_workspace() -> None:
    barrier, found = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        found.append(get_workspace(FIRST, 100))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in found}) == 1
    assert workspaces_bytes() == 100
