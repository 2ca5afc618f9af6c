"""Every claim, wait and raise of a backward launch on the device is what the plan prescribes."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.hooks import check_launch, logged, read_log
from tests.gpu.layers import GPU, backward_arguments, gradients, on_device, saved
from tests.proof import library
from tests.steps import assert_same_bits, make_dy
from torch import Tensor

from moe_megakernel.plan import GradNeeds
from moe_megakernel.plan_names import Counter, Direction
from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

pytestmark = GPU

LAYERS = {
    "short": lambda: make_inputs(random_routing(300, 8, 4, zipf=1.0, drop=0.1), 136, 200, 8),
    "biases": lambda: make_inputs(random_routing(300, 8, 4, zipf=1.0, drop=0.1), 136, 200, 8, bias=True),
    "one token": lambda: make_inputs(torch.tensor([[2, 1]])),
    "empty experts": lambda: make_inputs(random_routing(20, 64, 2), 64, 64, 64),
    "all dropped": lambda: make_inputs(torch.full((40, 2), -1)),
    "one expert": lambda: make_inputs(torch.full((1000, 1), 3), 256, 128),
    "not gated": lambda: make_inputs(random_routing(300, 8, 4), 264, 520, 8, activation="relu2"),
}


@pytest.fixture(autouse=True)
def _checker() -> None:
    try:
        library.load()
    except RuntimeError as error:
        pytest.skip(str(error))


def all_needs(inputs: LayerInputs, recompute: bool = False) -> GradNeeds:
    """Every gradient that there is."""
    return GradNeeds(
        bias_gate_up=inputs.bias_gate_up is not None, bias_down=inputs.bias_down is not None, recompute=recompute
    )


def run_logged(inputs: LayerInputs, needs: GradNeeds, launches: int = 3) -> list[Tensor]:
    """Records of several launches, which must give the bits of one without a log."""
    y = inputs.leaves(**needs._asdict()).call(backend="mega", recompute=needs.recompute)
    arguments = backward_arguments(y, make_dy(inputs.x))
    plain = gradients(arguments)
    with logged(Direction.BACKWARD) as logs:
        found = [gradients(arguments) for _ in range(launches)]
    for results in found:
        assert_same_bits(dict(results), dict(plain))
    assert len(logs) == launches
    records = [read_log(log) for log in logs]
    offsets = saved(inputs, "mega").expert_offsets
    for number, rows in enumerate(records):
        assert check_launch(rows, inputs, offsets, Direction.BACKWARD, needs) == "", f"launch {number}"
    return records


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", LAYERS)
def test_launches_follow_the_plan(name: str, recompute: bool) -> None:
    inputs = on_device(LAYERS[name]())
    run_logged(inputs, all_needs(inputs, recompute))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_frozen_tensors_leave_their_tasks_out(recompute: bool) -> None:
    inputs = on_device(LAYERS["biases"]())
    for mask in range(1, 64):
        run_logged(inputs, GradNeeds(*(bool(mask >> i & 1) for i in range(6)), recompute), launches=1)


@pytest.mark.usefixtures("few_sms")
def test_every_counter_of_the_backward_is_waited_for() -> None:
    inputs = on_device(make_inputs(random_routing(1500, 4, 8), 256, 256, bias=True))
    counters = {Counter.DY_READY, Counter.DH_READY, Counter.EXPERT_DH, Counter.EXPERT_DY, Counter.EXPERT_X}
    for recompute in (False, True):
        for records in run_logged(inputs, all_needs(inputs, recompute), launches=2):
            waits = records[records[:, 2] == 1]
            for counter in counters | ({Counter.X_READY, Counter.A_READY} if recompute else set()):
                assert bool((waits[:, 4] == counter).any()), counter.name


@pytest.mark.usefixtures("few_sms")
def test_a_changed_log_is_rejected() -> None:
    inputs = on_device(make_inputs(random_routing(200, 4, 2)))
    offsets = saved(inputs, "mega").expert_offsets
    needs = all_needs(inputs)
    (records,) = run_logged(inputs, needs, launches=1)
    for row in range(0, len(records), max(1, len(records) // 20)):
        lost = torch.cat([records[:row], records[row + 1 :]])
        if int(records[row, 4]) == Counter.PLAN_READY and int(records[row, 2]) == 2:
            continue  # what the generation is read from
        assert check_launch(lost, inputs, offsets, Direction.BACKWARD, needs) != "", f"without record {row}"
