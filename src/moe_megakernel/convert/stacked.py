"""Checkpoints with one tensor per projection for all experts: stacked, interleaved, and transposed as in GPT-OSS.

The three differ in two independent facts, whether gate and up rows alternate and whether the last two dimensions are
swapped; each combination in use has its named pair of functions. Called by users and by `blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .keys import ExpertWeights, Reader, check_experts


@dataclass(frozen=True)
class _Layout:
    interleaved: bool = False  # rows g0, u0, g1, u1, ... instead of all g, then all u
    transposed: bool = False  # [E, H, 2I] and [E, I, H] instead of [E, 2I, H] and [E, H, I]
    gated: bool = True

    @property
    def gate_up_key(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"


def _deinterleave(source: Tensor) -> Tensor:
    """[L, 2I, ...] with alternating rows to a new [L, 2I, ...] with the even rows first."""
    width = source.shape[1] // 2
    out = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    out[:, :width] = source[:, 0::2]
    out[:, width:] = source[:, 1::2]
    return out


def _interleave(source: Tensor) -> Tensor:
    width = source.shape[1] // 2
    out = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    out[:, 0::2] = source[:, :width]
    out[:, 1::2] = source[:, width:]
    return out


def _read(
    converter: str,
    layout: _Layout,
    state_dict: Mapping[str, Tensor],
    num_experts: int,
    prefix: str,
    experts: range | None,
    bias: bool,
    strict: bool,
) -> dict[str, Tensor]:
    reader = Reader(converter, state_dict)
    taken = check_experts(converter, num_experts, experts)
    stem = f"{prefix}experts."
    gate_up_key, down_key = stem + layout.gate_up_key, f"{stem}down_proj"
    needed = [gate_up_key, down_key]
    if bias:
        needed += [f"{gate_up_key}_bias", f"{down_key}_bias"]
    reader.check_keys(needed, under=stem, strict=strict)

    down = reader.tensor(down_key, 3)
    gate_up = reader.tensor(gate_up_key, 3)
    down_EHI = down.transpose(1, 2) if layout.transposed else down
    hidden, width = down_EHI.shape[1:]
    rows = 2 * width if layout.gated else width
    reader.expect(down_key, down, (num_experts, *down.shape[1:]), down.dtype)
    shape = (num_experts, hidden, rows) if layout.transposed else (num_experts, rows, hidden)
    reader.expect(gate_up_key, gate_up, shape, gate_up.dtype)

    mine = slice(taken.start, taken.stop) if len(taken) else slice(0, 0)
    gate_up = gate_up.detach()[mine]
    gate_up = gate_up.transpose(1, 2) if layout.transposed else gate_up
    out = {
        "w_gate_up": _deinterleave(gate_up) if layout.interleaved else gate_up.contiguous(),
        "w_down": down_EHI.detach()[mine].contiguous(),
    }
    if bias:
        gate_up_bias = reader.tensor(f"{gate_up_key}_bias", 2)
        down_bias = reader.tensor(f"{down_key}_bias", 2)
        reader.expect(f"{gate_up_key}_bias", gate_up_bias, (num_experts, rows), gate_up_bias.dtype)
        reader.expect(f"{down_key}_bias", down_bias, (num_experts, hidden), down_bias.dtype)
        gate_up_bias = gate_up_bias.detach()[mine]
        out["bias_gate_up"] = _deinterleave(gate_up_bias) if layout.interleaved else gate_up_bias.contiguous()
        out["bias_down"] = down_bias.detach()[mine].contiguous()
    return out


def _write(converter: str, layout: _Layout, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    own = ExpertWeights.read(converter, weights, gated=layout.gated)
    stem = f"{prefix}experts."
    gate_up_key, down_key = stem + layout.gate_up_key, f"{stem}down_proj"

    def rows(tensor: Tensor) -> Tensor:
        return _interleave(tensor.detach()) if layout.interleaved else tensor.detach()

    def columns(tensor: Tensor) -> Tensor:
        return (tensor.transpose(1, 2) if layout.transposed else tensor).contiguous()

    out = {gate_up_key: columns(rows(own.w_gate_up)), down_key: columns(own.w_down.detach())}
    if own.bias_gate_up is not None and own.bias_down is not None:
        out[f"{gate_up_key}_bias"] = rows(own.bias_gate_up).contiguous()
        out[f"{down_key}_bias"] = own.bias_down.detach().contiguous()
    return out


def from_stacked(
    state_dict: Mapping[str, Tensor],
    *,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    gated: bool = True,
    bias: bool = False,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Takes experts.gate_up_proj [E, 2I, H] (gate rows first) and experts.down_proj [E, H, I].

    This is the layer's own layout and the one transformers 5 keeps in memory for most models, so the results share
    memory with the checkpoint; `load_state_dict` copies them. With `gated=False` the first key is experts.up_proj
    [E, I, H]; with `bias` there are experts.gate_up_proj_bias [E, 2I] and experts.down_proj_bias [E, H] too. Arguments,
    results and errors otherwise as in `from_per_expert`.
    """
    layout = _Layout(gated=gated)
    return _read("from_stacked", layout, state_dict, num_experts, prefix, experts, bias, strict)


def to_stacked(weights: Mapping[str, Tensor], *, prefix: str = "", gated: bool = True) -> dict[str, Tensor]:
    """The reverse of `from_stacked`; the experts that `weights` holds become the whole of each tensor.

    A rank of several holds a part of the experts only: gather the parts along dimension 0 first, or write with
    `to_per_expert`. The results share memory with `weights`.
    """
    return _write("to_stacked", _Layout(gated=gated), weights, prefix)


def from_interleaved(
    state_dict: Mapping[str, Tensor],
    *,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    bias: bool = False,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Takes experts.gate_up_proj [E, 2I, H] with alternating rows g0, u0, g1, u1, ... and experts.down_proj [E, H, I].

    With `bias` the same order holds for experts.gate_up_proj_bias [E, 2I]. Nothing in a checkpoint tells this layout
    from `from_stacked`'s: its writer must. Arguments, results and errors otherwise as in `from_per_expert`.
    """
    layout = _Layout(interleaved=True)
    return _read("from_interleaved", layout, state_dict, num_experts, prefix, experts, bias, strict)


def to_interleaved(weights: Mapping[str, Tensor], *, prefix: str = "") -> dict[str, Tensor]:
    """The reverse of `from_interleaved`, bit for bit; on several ranks see `to_stacked`."""
    return _write("to_interleaved", _Layout(interleaved=True), weights, prefix)


def from_gpt_oss(
    state_dict: Mapping[str, Tensor],
    *,
    num_experts: int,
    prefix: str = "",
    experts: range | None = None,
    bias: bool = True,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Takes experts.gate_up_proj [E, H, 2I] with alternating columns g0, u0, ... and experts.down_proj [E, I, H].

    GPT-OSS has experts.gate_up_proj_bias [E, 2I] (alternating too) and experts.down_proj_bias [E, H], so `bias` is on.
    Its weights are published in MXFP4 (`*_blocks`, `*_scales`), which are other keys: dequantise first. Arguments,
    results and errors otherwise as in `from_per_expert`.
    """
    layout = _Layout(interleaved=True, transposed=True)
    return _read("from_gpt_oss", layout, state_dict, num_experts, prefix, experts, bias, strict)


def to_gpt_oss(weights: Mapping[str, Tensor], *, prefix: str = "") -> dict[str, Tensor]:
    """The reverse of `from_gpt_oss`, bit for bit; on several ranks see `to_stacked`."""
    return _write("to_gpt_oss", _Layout(interleaved=True, transposed=True), weights, prefix)
