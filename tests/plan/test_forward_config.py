"""What `cutlass_configs/forward.h` chooses for a launch: what the choice depends on, and that plans fit it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.cases import KINDS, count_classes, random_ids

from moe_megakernel.hopper.launch import LaunchSizes
from moe_megakernel.hopper.testing import BIAS_COLUMNS, MOST_WAITS, RECORD_WORDS, most_records, plan_config
from moe_megakernel.plan import ROW_TILE, PlanConfig, Schedule, Tiling, make_layout, make_plan
from moe_megakernel.plan_names import Region

#: Sizes of named models and of odd ones: E, H, I, K.
SHAPES = [
    (128, 2048, 768, 8),
    (64, 4096, 1024, 10),
    (48, 7168, 2048, 8),
    (8, 4096, 14336, 2),
    (64, 1536, 512, 4),
    (1024, 8, 8, 1),
    (1, 8, 136, 3),
    (5, 65536, 264, 2),
]
SMALL = st.fixed_dictionaries(
    {
        "top_k": st.integers(1, 6),
        "num_experts": st.integers(1, 40),
        "hidden": st.integers(1, 600).map(lambda n: 8 * n),
        "width": st.integers(1, 200).map(lambda n: 8 * n),
        "gated": st.booleans(),
        "staged": st.booleans(),
        "num_sms": st.integers(1, 70).map(lambda n: 2 * n),
    }
)


def config_of(shape: tuple[int, int, int, int], **changes: Any) -> PlanConfig:
    experts, hidden, width, top_k = shape
    sizes = {"tokens": 8192, "top_k": top_k, "num_experts": experts, "hidden": hidden, "width": width}
    return plan_config(**{**sizes, "gated": True, "staged": False, "num_sms": 132, **changes})


def max_row_tiles(config: PlanConfig) -> int:
    """Row tiles that any routing can give."""
    return make_layout(config)[Region.ROW_TILES].bytes // 12


def without_rings(config: PlanConfig) -> tuple[Tiling, Schedule]:
    return config.tiling, replace(config.schedule, x_slots=0, a_slots=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_only_size_rings(shape: tuple[int, int, int, int]) -> None:
    """So a token's result does not depend on how many others are in its batch."""
    expected = without_rings(config_of(shape))
    for tokens in (1, 2, 127, 129, 4096, 100_000):
        assert without_rings(config_of(shape, tokens=tokens)) == expected


#: By SMs: tiles are twice as broad as high, so n row tiles make a square with n / 2 columns.
SQUARE_TILES = {2: 2, 8: 4, 32: 8, 64: 10, 128: 16, 132: 16, 148: 16}


@pytest.mark.parametrize("shape", SHAPES)
def test_sms_only_size_the_order_and_its_rings(shape: tuple[int, int, int, int]) -> None:
    expected = config_of(shape)
    rings = []
    for num_sms, square in SQUARE_TILES.items():
        found = config_of(shape, num_sms=num_sms)
        assert found.schedule.num_clusters == num_sms // 2
        assert found.schedule.x_slots >= min(found.schedule.segment_tiles, expected.schedule.x_slots)
        rings.append(found.schedule.x_slots)
        assert found.schedule.wgrad_tiles == square
        assert 2 <= found.schedule.segment_tiles <= square
        names = ("num_clusters", "segment_tiles", "wgrad_tiles", "x_slots", "a_slots")
        sized = {name: getattr(expected.schedule, name) for name in names}
        assert replace(found, schedule=replace(found.schedule, **sized)) == expected
    assert rings == sorted(rings)
    assert set(rings[4:]) == {expected.schedule.x_slots}


@pytest.mark.parametrize(
    ("hidden", "num_sms", "tiles"),
    [
        *((2048, num_sms, square) for num_sms, square in SQUARE_TILES.items()),
        *((7168, num_sms, tiles) for num_sms, tiles in {2: 2, 8: 2, 16: 4, 32: 6, 64: 10, 132: 16}.items()),
        *((65536, num_sms, 2) for num_sms in (2, 8, 32, 64)),
        *((65536, num_sms, 4) for num_sms in (128, 132)),
        (1 << 20, 132, 2),
    ],
)
def test_the_rows_of_a_segment_stay_in_the_cache(hidden: int, num_sms: int, tiles: int) -> None:
    """40 MiB of it for 128 SMs or more, in pairs of row tiles that have begun to fit; no more than a square."""
    found = config_of((48, hidden, 2048, 8), num_sms=num_sms)
    assert found.schedule.segment_tiles == tiles


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_of_their_own_need_whole_rings_and_the_same_tiles(shape: tuple[int, int, int, int]) -> None:
    mega, staged = config_of(shape), config_of(shape, staged=True)
    tiles = max_row_tiles(staged)
    assert staged.schedule == replace(mega.schedule, separate_stages=True, x_slots=tiles, a_slots=tiles)
    assert (staged.problem, staged.tiling) == (mega.problem, mega.tiling)
    assert not mega.schedule.separate_stages
    assert mega.schedule.x_slots <= tiles


@given(SMALL, st.integers(1, 1200), st.sampled_from(KINDS), st.integers(0, 2**32 - 1))
def test_every_routing_fits(sizes: dict[str, Any], tokens: int, kind: str, seed: int) -> None:
    """`make_plan` refuses a configuration with a field out of range and rings that are too small for the routes."""
    config = plan_config(tokens=tokens, **sizes)
    assert (config.problem.max_tokens, config.problem.row_capacity) == (tokens, tokens * sizes["top_k"])
    ids = random_ids(np.random.default_rng(seed), kind, tokens, sizes["top_k"], sizes["num_experts"])
    counts = torch.from_numpy(count_classes(ids, sizes["num_experts"]))[None]
    plan = make_plan(config, counts, torch.tensor([tokens]))
    x_slots, a_slots = plan.ring_minimum.tolist()
    assert 1 <= x_slots <= config.schedule.x_slots or not len(plan.tiles)
    assert 1 <= a_slots <= config.schedule.a_slots or not len(plan.tiles)
    # As many records as the log of such a launch has, but for the waits with which roles start.
    records = len(plan.waits) + len(plan.raises) + len(plan.tasks) + len(plan.pulls)
    assert records <= most_records(LaunchSizes(tokens, **sizes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("staged", [False, True])
def test_layouts_fit(shape: tuple[int, int, int, int], staged: bool) -> None:
    config = config_of(shape, staged=staged)
    assert make_layout(config)[Region.X_RING].bytes == config.schedule.x_slots * ROW_TILE * shape[1] * 2


def test_a_log_is_no_larger_than_a_device_can_spare() -> None:
    assert most_records(LaunchSizes(64, 2, 8, 64, 48, True, False, 132)) < 10_000
    assert most_records(LaunchSizes(8192, 8, 128, 2048, 768, True, False, 132)) * RECORD_WORDS * 8 < 20 << 20


def test_constants_are_those_of_the_headers() -> None:
    headers = Path(__file__).parents[2] / "kernels" / "include" / "moe" / "plan"
    lists = re.findall(r"using (Waits|Raises) = SmallList<\w+, (\d+)>;", (headers / "dependencies.h").read_text())
    assert dict(lists) == {"Waits": str(MOST_WAITS), "Raises": str(MOST_WAITS)}
    assert re.findall(r"kBiasColumns = (\d+);", (headers / "tasks.h").read_text()) == [str(BIAS_COLUMNS)]
    assert RECORD_WORDS * 8 == 6 * 4 + 2 * 8


def test_values_of_a_configuration() -> None:
    config = config_of(SHAPES[0], staged=True)
    assert PlanConfig.from_values(config.tensor().tolist()) == config
    assert config.problem.gated is True
    assert config.schedule.separate_stages is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "expected tokens, top_k, num_experts, hidden and width >= 1, got 0, 8, 128, 2048 and 768"),
        ({"tokens": 2**28}, "tokens: expected at most 2147483647 routes, got tokens = 268435456, top_k = 8"),
        ({"num_sms": 7}, "num_sms: expected an even number >= 2, got 7"),
        ({"num_sms": 0}, "num_sms: expected an even number >= 2, got 0"),
    ],
)
def test_refused_sizes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"moe::hopper_plan_config: {message}"):
        config_of(SHAPES[0], **changes)


def test_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = (8, 2, 4, 64, 64, True, False, 132)
    real = torch.ops.moe.hopper_plan_config(*arguments)
    with FakeTensorMode():
        fake = torch.ops.moe.hopper_plan_config(*arguments)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
