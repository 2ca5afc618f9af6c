"""What is chosen for a backward launch: what the choice depends on, that plans fit it, and that logs have room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.cases import KINDS, count_classes, random_ids
from tests.plan.test_forward_config import SHAPES, SMALL
from tests.plan.test_forward_config import config_of as forward_config

from moe_megakernel.hopper import testing
from moe_megakernel.hopper.launch import LaunchSizes
from moe_megakernel.hopper.testing import RECORD_WORDS, most_records
from moe_megakernel.plan import GradNeeds, PlanConfig, make_plan
from moe_megakernel.plan_names import Direction

BACKWARD = Direction.BACKWARD


def config_of(shape: tuple[int, int, int, int], **changes: Any) -> PlanConfig:
    experts, hidden, width, top_k = shape
    sizes = {"tokens": 8192, "top_k": top_k, "num_experts": experts, "hidden": hidden, "width": width}
    given = {**sizes, "gated": True, "staged": False, "num_sms": 132, **changes}
    return testing.plan_config(**given, direction=BACKWARD)


def records_of(config: PlanConfig, tokens: int, kind: str, seed: int, needs: GradNeeds) -> int:
    """As many as the log of such a launch has, but for the waits with which roles start."""
    problem = config.problem
    ids = random_ids(np.random.default_rng(seed), kind, tokens, problem.top_k, problem.num_experts)
    counts = torch.from_numpy(count_classes(ids, problem.num_experts))[None]
    plan = make_plan(config, counts, torch.tensor([tokens]), BACKWARD, needs)
    return len(plan.waits) + len(plan.raises) + len(plan.tasks) + len(plan.pulls)


CALLS = (st.integers(1, 1200), st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.integers(0, 127))


@given(SMALL, *CALLS)
def test_every_routing_fits(sizes: dict[str, Any], tokens: int, kind: str, seed: int, mask: int) -> None:
    config = testing.plan_config(tokens=tokens, **sizes, direction=BACKWARD)
    assert (config.problem.max_tokens, config.problem.row_capacity) == (tokens, tokens * sizes["top_k"])
    needs = GradNeeds(*(bool(mask >> i & 1) for i in range(7)))
    most = most_records(LaunchSizes(tokens, **sizes), BACKWARD)
    assert records_of(config, tokens, kind, seed, needs) <= most


@pytest.mark.parametrize("shape", SHAPES)
def test_neither_tokens_nor_sms_reach_the_tiles(shape: tuple[int, int, int, int]) -> None:
    """So no bit of a gradient depends on them."""
    expected = config_of(shape)
    for tokens in (1, 127, 129, 100_000):
        assert config_of(shape, tokens=tokens).tiling == expected.tiling
        assert config_of(shape, tokens=tokens).tiling.act_columns == forward_config(shape).tiling.act_columns
    for num_sms in (2, 8, 64, 148):
        found = config_of(shape, num_sms=num_sms)
        assert found.schedule.num_clusters == num_sms // 2
        assert replace(found, schedule=expected.schedule) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_of_their_own_have_the_same_tiles(shape: tuple[int, int, int, int]) -> None:
    mega, staged = config_of(shape), config_of(shape, staged=True)
    assert (staged.problem, staged.tiling) == (mega.problem, mega.tiling)
    assert staged.schedule.separate_stages
    assert not mega.schedule.separate_stages


def test_a_log_is_no_larger_than_a_device_can_spare() -> None:
    sizes = LaunchSizes(8192, 8, 128, 2048, 768, True, False, 132)
    assert most_records(sizes, BACKWARD) * RECORD_WORDS * 8 < 64 << 20


@pytest.mark.parametrize("changes", [{"tokens": 0}, {"tokens": 2**28}, {"num_sms": 7}], ids=str)
def test_refused_sizes(changes: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="moe::hopper_backward_plan_config: "):
        config_of(SHAPES[0], **changes)
