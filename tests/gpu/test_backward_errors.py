"""Backward steps that fail on the device: of a refused forward, and with signals that never come. NaN, a late error,
then all right.
"""

from __future__ import annotations

import pytest
import torch
from tests.gpu.hooks import fault
from tests.gpu.layers import GPU, both_backends, no_host_sync, on_device
from tests.gpu.test_backward_needs import buffers
from tests.gpu.test_forward_errors import with_ids
from tests.steps import Results, assert_same_bits, make_dy, run_step
from torch import Tensor

import moe_megakernel
from moe_megakernel import MoEError, RoutingError
from moe_megakernel.plan_names import Counter, Direction
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU


def assert_all_nan(tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        assert tensor is not None, name
        assert tensor.isnan().all(), name


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@both_backends
def test_a_refused_step(backend: str, recompute: bool) -> None:
    """Every gradient is NaN, main gradients too; the next forward says why, and the step after it is right."""
    good = on_device(make_inputs(random_routing(300, 6, 3, drop=0.1), 72, 64, 6, bias=True))
    expected = run_step(good, backend=backend, recompute=recompute)
    broken, main = with_ids(good, {(31, 1): 6}), buffers(good)
    assert_all_nan(run_step(broken, backend=backend, recompute=recompute))
    torch.cuda.synchronize()
    with pytest.raises(RoutingError, match=r"got 6 at topk_idx\[31, 1\]"):
        good.call(backend=backend)
    leaves = broken.leaves()
    leaves.call(backend=backend, recompute=recompute, **main).sum().backward()
    assert_all_nan(dict(main))
    with pytest.raises(RoutingError, match=r"got 6 at topk_idx\[31, 1\]"):
        moe_megakernel.check_errors()
    assert_same_bits(run_step(good, backend=backend, recompute=recompute), expected)


@both_backends
def test_a_backward_neither_waits_nor_raises(backend: str) -> None:
    """What an earlier step left is raised by the next forward, not in the middle of autograd."""
    good = on_device(make_inputs(random_routing(40, 4, 2)))
    expected, dy = run_step(good, backend=backend), make_dy(good.x)
    leaves = good.leaves()
    y = leaves.call(backend=backend)
    with torch.no_grad():
        with_ids(good, {(3, 0): 4}).call(backend=backend)
    torch.cuda.synchronize()
    with no_host_sync():
        y.backward(dy)
    assert_same_bits({"y": y.detach(), **leaves.grads()}, expected)
    with pytest.raises(RoutingError, match=r"got 4 at topk_idx\[3, 0\]"):
        moe_megakernel.check_errors()


def waiting_layer() -> LayerInputs:
    """Many row tiles in each of a few experts, so that every kind of counter is waited for."""
    return on_device(make_inputs(random_routing(2560, 4, 8), 256, 1024))


#: A counter without its raises -> the counters whose wait may be the first to run out of time. The first two are waited
#: for where h is recomputed.
FAULTS: dict[Counter, set[Counter]] = {
    Counter.X_READY: {Counter.X_READY, Counter.A_READY, Counter.DH_READY, Counter.EXPERT_DH, Counter.PEER_DONE},
    Counter.A_READY: {Counter.A_READY, Counter.DH_READY, Counter.EXPERT_DH, Counter.STORED, Counter.PEER_DONE},
    Counter.DY_READY: {Counter.DY_READY, Counter.DH_READY, Counter.EXPERT_DH, Counter.STORED, Counter.PEER_DONE},
    Counter.DH_READY: {Counter.DH_READY, Counter.STORED, Counter.PEER_DONE},
    Counter.EXPERT_DH: {Counter.EXPERT_DH},
    Counter.EXPERT_DY: {Counter.EXPERT_DY},
    Counter.EXPERT_X: {Counter.EXPERT_X},
    Counter.STORED: {Counter.STORED, Counter.PEER_DONE},
    Counter.PULLED: {Counter.PULLED, Counter.PEER_DONE},
    Counter.PEER_DONE: {Counter.PEER_DONE},
}
ROLES = "role (pull|load|compute)"
TASKS = (
    "task (gate_up|down_dgrad|route_grad|gate_up_dgrad|wgrad_down|wgrad_gate_up|bias_down|bias_gate_up|dispatch|"
    "combine|close|drain)"
)


def lost_signal(inputs: LayerInputs, backend: str, counter: Counter, **options: object) -> Results:
    """A step whose backward misses a signal; it recomputes h where the signal is one of that."""
    leaves = inputs.leaves()
    y = leaves.call(backend=backend, recompute=counter in (Counter.X_READY, Counter.A_READY), **options)
    with fault(counter, 0, Direction.BACKWARD):
        y.backward(make_dy(y))
    return leaves.grads()


def check_fault(backend: str, counter: Counter) -> None:
    inputs = waiting_layer()
    expected = run_step(inputs, backend=backend)
    moe_megakernel.check_errors()
    results = lost_signal(inputs, backend, counter)
    names = "|".join(sorted(c.name.lower() for c in FAULTS[counter]))
    with pytest.raises(MoEError, match=rf"(?is)({names})\[\d+\].*{ROLES}.*{TASKS}") as caught:
        moe_megakernel.check_errors()
    assert not isinstance(caught.value, RoutingError)
    assert_all_nan(results)
    moe_megakernel.check_errors()
    for _ in range(2):
        assert_same_bits(run_step(inputs, backend=backend), expected)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("counter", FAULTS, ids=lambda c: c.name.lower())
def test_a_lost_signal_ends_in_an_error(counter: Counter) -> None:
    """The launch ends, with NaN; the error names who waited for what; the next step, in a new workspace, is right."""
    check_fault("mega", counter)


@pytest.mark.usefixtures("short_timeout")
@pytest.mark.parametrize("counter", [Counter.DY_READY, Counter.DH_READY], ids=lambda c: c.name.lower())
def test_a_lost_signal_between_stages(counter: Counter) -> None:
    check_fault("staged", counter)


@pytest.mark.usefixtures("short_timeout")
def test_a_lost_signal_reaches_main_gradients_and_the_next_forward() -> None:
    inputs = on_device(make_inputs(random_routing(300, 4, 2), 64, 64, bias=True))
    main = buffers(inputs)
    expected = inputs.call(backend="mega")
    results = lost_signal(inputs, "mega", Counter.DH_READY, **main)
    torch.cuda.synchronize()
    with pytest.raises(MoEError, match="timeout: expected"):
        inputs.call(backend="mega")
    assert results.pop("w_gate_up") is results.pop("w_down") is None
    assert_all_nan({**results, **main})
    assert_equal_bits(inputs.call(backend="mega"), expected)


@pytest.mark.usefixtures("short_timeout")
def test_a_fault_of_one_direction_leaves_the_other_alone() -> None:
    inputs = on_device(make_inputs(random_routing(300, 4, 2), 64, 64))
    expected = run_step(inputs, backend="mega")
    with fault(Counter.DH_READY, 0), fault(Counter.A_READY, 0, Direction.BACKWARD):
        assert_same_bits(run_step(inputs, backend="mega"), expected)
    moe_megakernel.check_errors()
