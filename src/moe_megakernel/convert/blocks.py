"""Whole MoE blocks of published models: experts, router and shared expert under the names each model uses.

Puts the expert converters and a small table of names together, so that nothing of a block is left unread. Called by
users who load or save a layer of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .keys import EXPERT_KEYS, CheckpointKeyError, Reader
from .per_expert import MIXTRAL_NAMES, PROJ_NAMES, ExpertNames, from_per_expert, to_per_expert
from .stacked import (
    from_gpt_oss,
    from_interleaved,
    from_stacked,
    to_gpt_oss,
    to_interleaved,
    to_stacked,
)

LAYOUTS = ("per_expert", "stacked", "interleaved", "gpt_oss")


@dataclass(frozen=True)
class Family:
    """How a family of models names one MoE block."""

    layout: str = "per_expert"
    names: ExpertNames = PROJ_NAMES
    bias: bool = False
    #: key of `MoE.state_dict()` -> key in the checkpoint, for tensors stored as they are.
    plain: Mapping[str, str] = field(default_factory=lambda: {"router.weight": "gate.weight"})
    #: what stands before gate_proj, up_proj and down_proj of the shared expert; "" for none.
    shared: str = ""


_GATE = {"router.weight": "gate.weight"}

FAMILIES: dict[str, Family] = {
    "mixtral": Family(names=MIXTRAL_NAMES),
    "qwen2_moe": Family(plain={**_GATE, "shared.w_gate": "shared_expert_gate.weight"}, shared="shared_expert"),
    "qwen3_moe": Family(),
    "deepseek_v2": Family(shared="shared_experts"),
    "deepseek_v3": Family(
        plain={**_GATE, "router.correction_bias": "gate.e_score_correction_bias"}, shared="shared_experts"
    ),
    "gpt_oss": Family(
        layout="gpt_oss", bias=True, plain={"router.weight": "router.weight", "router.bias": "router.bias"}
    ),
}


def _family(converter: str, family: str, layout: str | None) -> tuple[Family, str]:
    if family not in FAMILIES:
        raise ValueError(f"{converter}: family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    found = FAMILIES[family]
    layout = found.layout if layout is None else layout
    if layout not in LAYOUTS:
        raise ValueError(f"{converter}: layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    return found, layout


def from_block(
    state_dict: Mapping[str, Tensor],
    *,
    family: str,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    layout: str | None = None,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Everything that `MoE.load_state_dict` wants of one block.

    Args:
        state_dict: the whole checkpoint; only keys that start with `prefix` are looked at.
        family: mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3 or gpt_oss.
        num_experts: E.
        prefix: of the block, for instance "model.layers.3.mlp.".
        experts: the experts to take; see `from_per_expert`.
        layout: how the experts are stored, where it is not as the family publishes them: per_expert, stacked
            (transformers 5 in memory), interleaved or gpt_oss.
        strict: False turns surplus keys under `prefix` into a warning. A missing key always raises.

    Raises:
        CheckpointKeyError: missing or surplus keys, both listed.
        ValueError, TypeError: shapes or dtypes that do not fit together.
    """
    names, layout = _family("from_block", family, layout)
    reader = Reader("from_block", state_dict)
    stem = f"{prefix}{names.shared}"
    shared = [f"{stem}.{name}.weight" for name in PROJ_NAMES] if names.shared else []
    rest = [prefix + key for key in names.plain.values()] + shared
    expert_keys = [key for key in state_dict if key.startswith(f"{prefix}experts.")]
    reader.check_keys(rest, under=prefix, foreign=expert_keys, strict=strict)

    if layout == "per_expert":
        out = from_per_expert(
            state_dict,
            num_experts=num_experts,
            prefix=prefix,
            experts=experts,
            names=names.names,
            bias=names.bias,
            strict=strict,
        )
    else:
        read: Callable[..., dict[str, Tensor]] = {
            "stacked": from_stacked,
            "interleaved": from_interleaved,
            "gpt_oss": from_gpt_oss,
        }[layout]
        out = read(state_dict, num_experts=num_experts, prefix=prefix, experts=experts, bias=names.bias, strict=strict)
    for own, theirs in names.plain.items():
        out[own] = state_dict[prefix + theirs].detach()
    if shared:
        gate, up, down = (reader.tensor(key, 2) for key in shared)
        reader.expect(shared[1], up, tuple(gate.shape), gate.dtype)
        reader.expect(shared[2], down, tuple(gate.shape[::-1]), gate.dtype)
        out["shared.w_gate_up"] = torch.cat((gate.detach(), up.detach()))
        out["shared.w_down"] = down.detach()
    return out


def to_block(
    weights: Mapping[str, Tensor],
    *,
    family: str,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    layout: str | None = None,
) -> dict[str, Tensor]:
    """The reverse of `from_block`, bit for bit, from `MoE.state_dict()`.

    On several ranks use the layout per_expert: each rank writes the keys of its `experts`, and the router and shared
    expert, which all ranks hold, come with each. The other layouts want all experts in `weights`.

    Raises:
        CheckpointKeyError: keys of `weights` that the family does not have, or lacks.
        ValueError: shapes that do not fit together.
    """
    names, layout = _family("to_block", family, layout)
    shared_keys = ["shared.w_gate_up", "shared.w_down"] if names.shared else []
    expert_keys = EXPERT_KEYS if names.bias else EXPERT_KEYS[:2]
    needed = {*expert_keys, *names.plain, *shared_keys}
    if needed != set(weights):
        raise CheckpointKeyError("to_block", needed - set(weights), set(weights) - needed)
    own = {key: weights[key] for key in expert_keys}
    if layout == "per_expert":
        out = to_per_expert(own, num_experts=num_experts, prefix=prefix, experts=experts, names=names.names)
    else:
        held = own["w_down"].shape[0]
        if held != num_experts:
            raise ValueError(f"to_block: w_down: expected all {num_experts} experts with layout {layout}, got {held}")
        write: Callable[..., dict[str, Tensor]] = {
            "stacked": to_stacked,
            "interleaved": to_interleaved,
            "gpt_oss": to_gpt_oss,
        }[layout]
        out = write(own, prefix=prefix)
    for key, theirs in names.plain.items():
        out[prefix + theirs] = weights[key].detach()
    if names.shared:
        gate, up = weights["shared.w_gate_up"].detach().chunk(2)
        stem = f"{prefix}{names.shared}"
        for name, tensor in zip(PROJ_NAMES, (gate, up, weights["shared.w_down"].detach()), strict=True):
            out[f"{stem}.{name}.weight"] = tensor
    return out
