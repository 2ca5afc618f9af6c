"""Steps that fail on the device: invalid expert ids, and signals that never come. NaN, a late error, then all right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.gpu.hooks import fault
from tests.gpu.layers import GPU, both_backends, no_host_sync, on_device
from tests.steps import assert_same_bits, run_step

import moe_megakernel
from moe_megakernel import MoEError, RoutingError
from moe_megakernel.plan_names import Counter
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU


def cpu_error(inputs: LayerInputs) -> str:
    """What the same call raises on the CPU."""
    with pytest.raises(RoutingError) as caught:
        inputs.to(torch.float32, "cpu").call()
    return str(caught.value)


def with_ids(inputs: LayerInputs, ids: dict[tuple[int, int], int], dtype: torch.dtype = torch.int64) -> LayerInputs:
    changed = inputs.topk_idx.to(dtype, copy=True)
    for place, value in ids.items():
        changed[place] = value
    return replace(inputs, topk_idx=changed)


BAD: dict[str, tuple[dict[tuple[int, int], int], torch.dtype]] = {
    "one past": ({(4, 1): 6}, torch.int64),
    "minus two": ({(299, 2): -2}, torch.int64),
    "valid in 32 bits": ({(17, 0): 2**32 + 1}, torch.int64),
    "the least": ({(0, 0): -(2**63)}, torch.int64),
    "int32": ({(4, 1): 2**31 - 1}, torch.int32),
    "int32, the least": ({(4, 1): -(2**31)}, torch.int32),
    "the first of several": ({(250, 2): 7, (31, 1): -9, (31, 2): 77, (100, 0): 6}, torch.int64),
    "every one": ({(t, k): 1000 + t for t in range(300) for k in range(3)}, torch.int64),
}


@pytest.mark.parametrize("case", BAD)
@both_backends
def test_invalid_ids(backend: str, case: str) -> None:
    """All of y and of every gradient is NaN; the next call raises the CPU's words, and the one after is right."""
    good = on_device(make_inputs(random_routing(300, 6, 3, drop=0.1), 72, 64, 6, bias=True))
    expected = run_step(good, backend=backend)
    broken = with_ids(good, *BAD[case])
    for name, tensor in run_step(broken, backend=backend).items():
        assert tensor is not None, name
        assert tensor.isnan().all(), name
    torch.cuda.synchronize()
    with pytest.raises(RoutingError) as caught:
        good.call(backend=backend)
    assert str(caught.value) == cpu_error(broken)
    assert_same_bits(run_step(good, backend=backend), expected)


@both_backends
def test_check_errors_raises_once_and_no_step_waits(backend: str) -> None:
    good = on_device(make_inputs(random_routing(40, 4, 2)))
    broken = with_ids(good, {(3, 0): 4})
    with torch.no_grad():
        good.call(backend=backend)
        with no_host_sync():
            y = broken.call(backend=backend)
        with pytest.raises(RoutingError, match=r"got 4 at topk_idx\[3, 0\]"):
            moe_megakernel.check_errors()
        assert y.isnan().all()
        moe_megakernel.check_errors()
        assert good.call(backend=backend).isfinite().all()


@both_backends
def test_the_first_of_several_failed_steps_is_reported(backend: str) -> None:
    good = on_device(make_inputs(random_routing(40, 4, 2)))
    with torch.no_grad():
        expected = good.call(backend=backend)
        broken, broken_too = with_ids(good, {(3, 0): 4}), with_ids(good, {(1, 1): 5})
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # so that the host has called again before the first has run
        first = broken.call(backend=backend)
        second = broken_too.call(backend=backend)
        between = good.call(backend=backend)
        with pytest.raises(RoutingError, match=r"got 4 at topk_idx\[3, 0\]"):
            moe_megakernel.check_errors()
        assert first.isnan().all()
        assert second.isnan().all()
        assert_equal_bits(between, expected)
        moe_megakernel.check_errors()


def waiting_layer() -> LayerInputs:
    """At least 160 row tiles, more than either ring holds, so that every kind of counter is waited for."""
    return on_device(make_inputs(random_routing(2560, 4, 8), 256, 1024))


#: A counter without its raises -> the counters whose wait may be the first to run out of time.
FAULTS: dict[Counter, set[Counter]] = {
    Counter.X_READY: {Counter.X_READY, Counter.A_READY},
    Counter.X_READ: {Counter.X_READ, Counter.X_READY},
    Counter.A_READY: {Counter.A_READY, Counter.A_READ},
    Counter.A_READ: {Counter.A_READ, Counter.A_READY},
    Counter.STORED: {Counter.STORED, Counter.PEER_DONE},
    Counter.PULLED: {Counter.PULLED, Counter.PEER_DONE},
    Counter.PEER_DONE: {Counter.PEER_DONE},
}
ROLES = "role (pull|load|compute)"
TASKS = "task (gate_up|down|dispatch|combine|close|drain)"


def check_fault(backend: str, counter: Counter) -> None:
    inputs = waiting_layer()
    with torch.no_grad():
        expected = inputs.call(backend=backend)
        moe_megakernel.check_errors()
        with fault(counter, 0):
            y = inputs.call(backend=backend)
        names = "|".join(sorted(c.name.lower() for c in FAULTS[counter]))
        with pytest.raises(MoEError, match=rf"(?is)({names})\b.*{ROLES}.*{TASKS}") as caught:
            moe_megakernel.check_errors()
        assert not isinstance(caught.value, RoutingError)
        assert y.isnan().all()
        moe_megakernel.check_errors()
        for _ in range(2):
            assert_equal_bits(inputs.call(backend=backend), expected)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("counter", FAULTS, ids=lambda c: c.name.lower())
def test_a_lost_signal_ends_in_an_error(counter: Counter) -> None:
    """The launch ends, with NaN; the error names who waited for what; the next call is right."""
    check_fault("mega", counter)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("counter", [Counter.X_READY, Counter.A_READY], ids=lambda c: c.name.lower())
def test_a_lost_signal_between_stages(counter: Counter) -> None:
    check_fault("staged", counter)


@pytest.mark.usefixtures("short_timeout")
def test_a_lost_signal_in_training() -> None:
    """Gradients of a step that ran out of time are NaN as well."""
    inputs = on_device(make_inputs(random_routing(300, 4, 2), 64, 64, bias=True))
    expected = run_step(inputs, backend="mega")
    leaves = inputs.leaves()
    with fault(Counter.A_READY, 0):
        y = leaves.call(backend="mega")
    y.sum().backward()
    tensors: dict[str, Any] = {"y": y, **leaves.grads()}
    for name, tensor in tensors.items():
        assert tensor.isnan().all(), name
    with pytest.raises(MoEError, match="a_ready"):
        moe_megakernel.check_errors()
    assert_same_bits(run_step(inputs, backend="mega"), expected)
