"""Named shapes of mixture-of-experts layers: the one table that every command, benchmark and simulation looks up.

Owns the numbers and their names. A shape says what a model's layer is, never how it is split over ranks; the benchmark
shapes A to F are slices that fit one GPU and carry their number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer. `tokens` is T on every rank, or None where the caller chooses it."""

    slug: str
    name: str
    num_experts: int  # E
    hidden: int  # H
    width: int  # I
    top_k: int  # K
    tokens: int | None = None  # T
    gated: bool = True

    def flops(self, tokens: int, direction: str = "forward") -> float:
        """Useful floating-point operations for `tokens` tokens: 6 T K H I forward, 12 T K H I backward.

        A layer without a gate has two products instead of three, so two thirds of that.
        """
        products = 3 if self.gated else 2
        passes = {"forward": 1, "backward": 2, "both": 3}[direction]
        return 2.0 * products * passes * tokens * self.top_k * self.hidden * self.width


_MODELS = (
    Shape("kimi-k2", "Kimi K2.7 Code", 384, 7168, 2048, 8),
    Shape("glm-5.2", "GLM-5.2", 256, 6144, 2048, 8),
    Shape("qwen3.5-397b", "Qwen3.5-397B-A17B", 512, 4096, 1024, 10),
    Shape("deepseek-v4-pro", "DeepSeek-V4-Pro", 384, 7168, 3072, 6),
    Shape("qwen3-30b", "Qwen3-30B-A3B", 128, 2048, 768, 8),
    Shape("mixtral-8x7b", "Mixtral-8x7B", 8, 4096, 14336, 2),
)

# One GPU's share in the benchmarks: all experts of a small model, or an eighth of a large one's.
_BENCHMARKS = (
    Shape("bench-a", "A: Qwen3-30B-A3B", 128, 2048, 768, 8, tokens=8192),
    Shape("bench-b", "B: Qwen3-30B-A3B, long batch", 128, 2048, 768, 8, tokens=32768),
    Shape("bench-c", "C: Qwen3.5-397B, 1/8 of the experts", 64, 4096, 1024, 10, tokens=8192),
    Shape("bench-d", "D: Kimi, 1/8 of the experts", 48, 7168, 2048, 8, tokens=8192),
    Shape("bench-e", "E: Mixtral-8x7B", 8, 4096, 14336, 2, tokens=8192),
    Shape("bench-f", "F: SonicMoE 7B", 64, 1536, 512, 4, tokens=24576),
)

SHAPES: dict[str, Shape] = {shape.slug: shape for shape in (*_MODELS, *_BENCHMARKS)}


def benchmark_shapes() -> dict[str, Shape]:
    """Letter, A to F -> the benchmark's shape."""
    return {shape.slug.removeprefix("bench-").upper(): shape for shape in _BENCHMARKS}


def find_shape(slug: str, op: str = "find_shape") -> Shape:
    """The shape of that name, in any case.

    Args:
        slug: a key of `SHAPES`, for instance "kimi-k2".
        op: the command that asks, for the error.

    Raises:
        ValueError: there is no such shape; the message lists those there are.
    """
    found = SHAPES.get(slug.lower())
    if found is None:
        raise ValueError(f"{op}: shape: expected one of {', '.join(SHAPES)}, got {slug!r}")
    return found
