"""The options of a training run as plain data, and the checks that refuse a bad one before any process starts.

`cli/train.py` builds a `TrainConfig`, `launch.py` sends it to the ranks as JSON, and `checkpoint.py` stores it so that
a resumed run can be compared with the run that it continues.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float64")

# What may differ between a run and its continuation: none of these reaches a loss beyond the order of sums.
FREE_ON_RESUME = frozenset(
    {"text", "out", "ranks", "resume", "checkpoint_every", "compile", "device", "backend", "threads", "profile"}
)


class TrainError(Exception):
    """A run cannot go on; the message is shown without a traceback and the process exits with 1."""

    exit_code = 1


class ArgumentError(TrainError):
    """An option is wrong: `train: argument: expected ..., got ...`, exit code 2."""

    exit_code = 2

    def __init__(self, argument: str, expected: str, got: object) -> None:
        super().__init__(f"train: {argument}: expected {expected}, got {got}")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The defaults are the demo: under three minutes on two CPU cores with two ranks.

    `batch` is the number of sequences in a step over all ranks, `seq` their length in bytes, `steps` the whole run
    (the cosine schedule ends there), `threads` the CPU threads of each rank. `text` empty means the documentation that
    ships with CPython. `dtype` bfloat16 is autocast over fp32 parameters; the others are the parameters' own dtype.
    `profile` records a few steps of every rank (`profiled.py`).
    """

    text: tuple[str, ...] = ()
    out: str = "runs/demo"
    ranks: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    backend: str = "auto"
    compile: bool = True
    steps: int = 160
    batch: int = 16
    seq: int = 128
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_width: int = 128
    lr: float = 4e-3
    seed: int = 0
    checkpoint_every: int = 100
    resume: bool = False
    threads: int = 1
    profile: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        fields = json.loads(text)
        fields["text"] = tuple(fields["text"])
        return cls(**fields)

    def model_and_data(self) -> dict[str, Any]:
        """The fields that a continuation must share with the run that it continues."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in FREE_ON_RESUME}


def check_config(config: TrainConfig) -> None:
    """Raises ArgumentError for the first option that cannot work."""
    for name in (
        "ranks",
        "steps",
        "batch",
        "seq",
        "layers",
        "hidden",
        "heads",
        "experts",
        "top_k",
        "expert_width",
        "threads",
    ):
        value = getattr(config, name)
        if value < 1:
            raise ArgumentError(option(name), "at least 1", value)
    if config.checkpoint_every < 0:
        raise ArgumentError(
            "--checkpoint-every", "a number of steps, or 0 for the last step only", config.checkpoint_every
        )
    if not 0.0 < config.lr < float("inf"):
        raise ArgumentError("--lr", "a positive number", config.lr)
    if not 0 <= config.seed < 1 << 31:
        raise ArgumentError("--seed", f"a number in [0, {1 << 31})", config.seed)
    if config.device not in DEVICES:
        raise ArgumentError("--device", " or ".join(DEVICES), config.device)
    if config.dtype not in DTYPES:
        raise ArgumentError("--dtype", " or ".join(DTYPES), config.dtype)
    if config.top_k > config.experts:
        raise ArgumentError("--top-k", f"at most --experts {config.experts}", config.top_k)
    if config.hidden % (2 * config.heads):
        raise ArgumentError(
            "--hidden", f"a multiple of 2 * --heads = {2 * config.heads} (rotary halves of every head)", config.hidden
        )
    if config.batch < config.ranks:
        raise ArgumentError("--batch", f"at least one sequence for each of --ranks {config.ranks}", config.batch)
    for path in config.text:
        if not Path(path).is_file():
            raise ArgumentError("--text", "files that exist", path)
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise ArgumentError("--out", "a folder", config.out)


def option(field: str) -> str:
    """`top_k` -> `--top-k`, as the command line spells it."""
    return "--" + field.replace("_", "-")
