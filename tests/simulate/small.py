"""Layers small enough that a simulation takes a tenth of a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_megakernel.hardware import H200, Hardware
from moe_megakernel.shapes import Shape
from moe_megakernel.simulate import Options

SHAPE = Shape("small", "Small", num_experts=16, hidden=1024, width=512, top_k=4)


def small_options(hardware: Hardware = H200, **changes: Any) -> Options:
    """Four ranks of four experts, 1024 rows a rank on average."""
    return replace(Options(SHAPE, hardware, ranks=4, tokens=256, expected_routing=True), **changes)
