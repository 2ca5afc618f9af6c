"""Where the scripts' rows go, and what they say of where they come from; rows are dataclasses of `bench.records`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_megakernel.bench import records
from moe_megakernel.shapes import Shape

ROOT = Path(__file__).resolve().parent


def machine(commit: str) -> dict[str, str]:
    """The fields of `records.Machine`, now and here."""
    return records.machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit)


def named_shape(letter: str, shape: Shape) -> dict[str, Any]:
    """What `records.Origin` has beside `Machine`."""
    sizes = {"T": shape.tokens, "H": shape.hidden, "I": shape.width, "E": shape.num_experts, "K": shape.top_k}
    return {"shape": letter, **sizes}


def default_path(name: str, gpu: str) -> Path:
    """Of the results of a GPU, a word of `records.gpu_word`."""
    return ROOT / "results" / gpu / f"{name}.csv"
