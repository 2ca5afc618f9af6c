"""Checkpoints with one tensor per expert and projection, as most models on the hub are stored.

    experts.{i}.gate_proj.weight [I, H]   experts.{i}.up_proj.weight [I, H]   experts.{i}.down_proj.weight [H, I]

and, where there are biases, `.bias` beside each `.weight`. Called by users and by `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .keys import ExpertWeights, Reader, check_experts


class ExpertNames(NamedTuple):
    """How a checkpoint calls the three projections of one expert."""

    gate: str
    up: str
    down: str


PROJ_NAMES = ExpertNames("gate_proj", "up_proj", "down_proj")
#: Mixtral: w1 is the gate, w3 the up and w2 the down projection.
MIXTRAL_NAMES = ExpertNames("w1", "w3", "w2")


def _expert_keys(prefix: str, expert: int, names: ExpertNames, gated: bool, bias: bool) -> list[str]:
    used = names if gated else names[1:]
    kinds = ("weight", "bias") if bias else ("weight",)
    return [f"{prefix}experts.{expert}.{name}.{kind}" for name in used for kind in kinds]


def from_per_expert(
    state_dict: Mapping[str, Tensor],
    *,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    names: ExpertNames = PROJ_NAMES,
    gated: bool = True,
    bias: bool = False,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Stacks the tensors of each expert into the layer's own.

    Each result is allocated once and filled in place; dtype and device are those of the first expert's tensors, and the
    others must agree. Without local experts (`experts` empty) the shapes come from expert 0.

    Args:
        state_dict: the whole checkpoint, or any part that holds the keys; only the keys needed are read.
        num_experts: E. Keys of an expert outside [0, E) are surplus.
        prefix: what stands before "experts.", for instance "model.layers.3.mlp.".
        experts: the experts to take, for instance `expert_range(num_experts, rank, ranks)`; None takes all. The other
            experts' keys may be there or not.
        names: PROJ_NAMES, MIXTRAL_NAMES or your own.
        gated: False for experts without a gate projection (relu2): w_gate_up is then the up projection alone.
        bias: whether the projections have biases.
        strict: False lets surplus keys under `prefix + "experts."` pass with a warning that names them. A missing key
            always raises.

    Returns:
        w_gate_up [L, 2I, H] and w_down [L, H, I]; with `bias` also bias_gate_up [L, 2I] and bias_down [L, H].

    Raises:
        CheckpointKeyError: missing or surplus keys, both listed.
        ValueError, TypeError: shapes or dtypes that do not fit together.
    """
    reader = Reader("from_per_expert", state_dict)
    taken = check_experts(reader.converter, num_experts, experts)
    source = taken if len(taken) else range(1)
    needed = [key for i in source for key in _expert_keys(prefix, i, names, gated, bias)]
    foreign = [key for i in range(num_experts) for key in _expert_keys(prefix, i, names, gated, bias)]
    reader.check_keys(needed, under=f"{prefix}experts.", foreign=foreign, strict=strict)

    first = f"{prefix}experts.{source.start}"
    up = reader.tensor(f"{first}.{names.up}.weight", 2)
    down = reader.tensor(f"{first}.{names.down}.weight", 2)
    width, hidden = up.shape
    halves = (names.gate, names.up) if gated else (names.up,)
    local = len(taken)
    out = {
        "w_gate_up": torch.empty((local, len(halves) * width, hidden), dtype=up.dtype, device=up.device),
        "w_down": torch.empty((local, hidden, width), dtype=down.dtype, device=down.device),
    }
    if bias:
        out["bias_gate_up"] = torch.empty((local, len(halves) * width), dtype=up.dtype, device=up.device)
        out["bias_down"] = torch.empty((local, hidden), dtype=down.dtype, device=down.device)

    def copy(key: str, target: Tensor) -> None:
        value = reader.tensor(key, target.dim())
        target.copy_(reader.expect(key, value, tuple(target.shape), target.dtype))

    with torch.no_grad():
        for row, expert in enumerate(taken):
            stem = f"{prefix}experts.{expert}"
            for half, name in enumerate(halves):
                rows = slice(half * width, (half + 1) * width)
                copy(f"{stem}.{name}.weight", out["w_gate_up"][row, rows])
                if bias:
                    copy(f"{stem}.{name}.bias", out["bias_gate_up"][row, rows])
            copy(f"{stem}.{names.down}.weight", out["w_down"][row])
            if bias:
                copy(f"{stem}.{names.down}.bias", out["bias_down"][row])
    return out


def to_per_expert(
    weights: Mapping[str, Tensor],
    *,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    names: ExpertNames = PROJ_NAMES,
    gated: bool = True,
) -> dict[str, Tensor]:
    """The reverse of `from_per_expert`, bit for bit; ranks that hold different `experts` write disjoint keys.

    `weights` holds w_gate_up and w_down, and both biases or none. The results share memory with them, as the tensors of
    a state_dict do, and do not overlap, so that safetensors writes them without a copy.

    Raises:
        CheckpointKeyError: keys of `weights` missing or surplus.
        ValueError: shapes that do not fit, or another number of experts than `experts` says.
    """
    converter = "to_per_expert"
    taken = check_experts(converter, num_experts, experts)
    own = ExpertWeights.read(converter, weights, gated=gated)
    if own.num_local != len(taken):
        raise ValueError(f"{converter}: w_down: expected {len(taken)} experts ({taken}), got {own.num_local}")
    halves = (names.gate, names.up) if gated else (names.up,)
    out: dict[str, Tensor] = {}

    def keep(key: str, view: Tensor) -> None:
        out[key] = view.detach().contiguous()

    for row, expert in enumerate(taken):
        stem = f"{prefix}experts.{expert}"
        for half, name in enumerate(halves):
            rows = slice(half * own.width, (half + 1) * own.width)
            keep(f"{stem}.{name}.weight", own.w_gate_up[row, rows])
            if own.bias_gate_up is not None:
                keep(f"{stem}.{name}.bias", own.bias_gate_up[row, rows])
        keep(f"{stem}.{names.down}.weight", own.w_down[row])
        if own.bias_down is not None:
            keep(f"{stem}.{names.down}.bias", own.bias_down[row])
    return out
