"""Every claim, wait and raise of a launch on the device is what the plan prescribes: the proof is about the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.hooks import check_launch, logged, plan_config, read_log
from tests.gpu.layers import GPU, on_device, saved
from tests.proof import library

from moe_megakernel.plan_names import Counter
from moe_megakernel.testing import LayerInputs, assert_equal_bits, make_inputs, random_routing

pytestmark = GPU

LAYERS = {
    "short": lambda: make_inputs(random_routing(300, 8, 4, zipf=1.0, drop=0.1), 136, 200, 8),
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


def run_logged(inputs: LayerInputs, launches: int = 3) -> list[torch.Tensor]:
    """Records of several launches, which must give the bits of one without a log."""
    plain = saved(inputs, "mega")
    with logged() as logs:
        ys = [saved(inputs, "mega").y for _ in range(launches)]
    for y in ys:
        assert_equal_bits(y, plain.y, "y")
    assert len(logs) == launches
    records = [read_log(log) for log in logs]
    for number, rows in enumerate(records):
        assert check_launch(rows, inputs, plain.expert_offsets) == "", f"launch {number}"
    return records


@pytest.mark.parametrize("name", LAYERS)
def test_launches_follow_the_plan(name: str) -> None:
    run_logged(on_device(LAYERS[name]()))


@pytest.mark.usefixtures("few_sms")
def test_rings_turn_over() -> None:
    """More row tiles than either ring holds: slots are waited for, and the log says so."""
    inputs = on_device(make_inputs(random_routing(2560, 4, 8), 256, 256))
    schedule = plan_config(inputs).schedule
    assert max(schedule.x_slots, schedule.a_slots) < 2560 * 8 // 128
    for records in run_logged(inputs):
        waits = records[records[:, 2] == 1]
        for counter in (Counter.X_READ, Counter.A_READ):
            assert bool((waits[:, 4] == counter).any()), counter.name


@pytest.mark.usefixtures("few_sms")
def test_a_changed_log_is_rejected() -> None:
    inputs = on_device(make_inputs(random_routing(200, 4, 2)))
    offsets = saved(inputs, "mega").expert_offsets
    (records,) = run_logged(inputs, launches=1)
    for row in range(0, len(records), max(1, len(records) // 20)):
        lost = torch.cat([records[:row], records[row + 1 :]])
        if int(records[row, 4]) == Counter.PLAN_READY and int(records[row, 2]) == 2:
            continue  # what the generation is read from
        assert check_launch(lost, inputs, offsets) != "", f"without record {row}"
