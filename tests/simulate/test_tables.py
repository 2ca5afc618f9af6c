"""Named shapes and GPUs: the numbers that were asked for, and what an unknown name says."""

from __future__ import annotations

import pytest

from moe_megakernel.hardware import HARDWARE, find_hardware
from moe_megakernel.shapes import SHAPES, find_shape


@pytest.mark.parametrize(
    ("slug", "sizes"),
    [
        ("kimi-k2", (384, 7168, 2048, 8)),
        ("glm-5.2", (256, 6144, 2048, 8)),
        ("qwen3.5-397b", (512, 4096, 1024, 10)),
        ("deepseek-v4-pro", (384, 7168, 3072, 6)),
        ("qwen3-30b", (128, 2048, 768, 8)),
        ("mixtral-8x7b", (8, 4096, 14336, 2)),
    ],
)
def test_shapes_have_the_models_sizes(slug: str, sizes: tuple[int, int, int, int]) -> None:
    shape = find_shape(slug.upper())
    assert (shape.num_experts, shape.hidden, shape.width, shape.top_k) == sizes
    assert shape.tokens is None


def test_benchmark_shapes_carry_their_tokens() -> None:
    assert {slug: SHAPES[slug].tokens for slug in SHAPES if slug.startswith("bench-")} == {
        "bench-a": 8192,
        "bench-b": 32768,
        "bench-c": 8192,
        "bench-d": 8192,
        "bench-e": 8192,
        "bench-f": 24576,
    }


def test_flops_count_three_products_forward_and_six_backward() -> None:
    shape = find_shape("bench-a")
    assert shape.flops(10) == 6 * 10 * 8 * 2048 * 768
    assert shape.flops(10, "backward") == 2 * shape.flops(10)
    assert shape.flops(10, "both") == 3 * shape.flops(10)


def test_unknown_names_list_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"bench: shape: expected one of kimi-k2, .*bench-f, got 'gpt'"):
        find_shape("gpt", "bench")
    with pytest.raises(ValueError, match=r"bench: hardware: expected one of h200, gb200, gb300, got 'a100'"):
        find_hardware("a100", "bench")


def test_achievable_rates_stay_below_the_datasheet() -> None:
    for gpu in HARDWARE.values():
        for share in (
            gpu.bf16_achievable,
            gpu.fp8_achievable,
            gpu.hbm_achievable,
            gpu.combine_achievable,
            gpu.pull_achievable,
            gpu.push_achievable,
        ):
            assert 0.0 < share < 1.0
        assert gpu.sms % 2 == 0
