"""Key bookkeeping of the converters: which keys a layout needs, which are there, and the errors that say so.

Every converter reads through a `Reader` and checks before it touches a tensor, so that a wrong checkpoint fails whole
and a mapping that loads lazily is asked only for what is needed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# Longest list of keys that an error spells out.
_SHOWN = 8


class CheckpointKeyError(KeyError):
    """Keys of a checkpoint are missing or surplus. `missing` and `surplus` hold all of them, sorted."""

    def __init__(self, converter: str, missing: Iterable[str], surplus: Iterable[str]) -> None:
        self.missing = sorted(missing)
        self.surplus = sorted(surplus)
        self.message = f"{converter}: state_dict: missing: {_listed(self.missing)}; surplus: {_listed(self.surplus)}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


def _listed(keys: list[str]) -> str:
    if not keys:
        return "none"
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + rest


def check_experts(converter: str, num_experts: int, experts: range | None) -> range:
    """`experts`, or all of them for None; ValueError unless it is a contiguous range inside [0, num_experts)."""
    if num_experts < 1:
        raise ValueError(f"{converter}: num_experts: expected at least 1, got {num_experts}")
    if experts is None:
        return range(num_experts)
    inside = len(experts) == 0 or (experts.start >= 0 and experts.stop <= num_experts)
    if experts.step != 1 or not inside:
        raise ValueError(f"{converter}: experts: expected a contiguous range in [0, {num_experts}), got {experts}")
    return experts


class Reader:
    """Reads one group of keys of a checkpoint and keeps shape and dtype errors uniform."""

    def __init__(self, converter: str, state_dict: Mapping[str, Tensor]) -> None:
        self.converter = converter
        self.state_dict = state_dict

    def check_keys(
        self, needed: Iterable[str], *, under: str, foreign: Iterable[str] = (), strict: bool = True
    ) -> None:
        """Checks that every key of `needed` is there and nothing else stands under the key prefix `under`.

        `foreign` keys belong to other ranks' experts: neither needed nor surplus. A missing key always raises; surplus
        keys raise, or with strict=False are named in a warning.
        """
        needed = set(needed)
        present = set(self.state_dict.keys())
        missing = needed - present
        surplus = {key for key in present if key.startswith(under)} - needed - set(foreign)
        if missing or (surplus and strict):
            raise CheckpointKeyError(self.converter, missing, surplus)
        if surplus:
            message = f"{self.converter}: surplus keys were not used: {_listed(sorted(surplus))}"
            warnings.warn(message, stacklevel=_level_of_caller())

    def tensor(self, key: str, dims: int) -> Tensor:
        """The tensor of `key`, which must have `dims` dimensions."""
        value = self.state_dict[key]
        if value.dim() != dims:
            raise ValueError(f"{self.converter}: {key}: expected {dims} dimensions, got shape {tuple(value.shape)}")
        return value

    def expect(self, key: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`value` again, which must have exactly this shape and dtype."""
        if tuple(value.shape) != shape:
            raise ValueError(f"{self.converter}: {key}: expected shape {shape}, got {tuple(value.shape)}")
        if value.dtype != dtype:
            raise TypeError(f"{self.converter}: {key}: expected dtype {dtype} like its neighbours, got {value.dtype}")
        return value


def _level_of_caller() -> int:
    """The stacklevel at which a warning of this function's caller points at the code that called the converters."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(__package__ or ""):
        level, frame = level + 1, frame.f_back
    return level + 1


EXPERT_KEYS = ("w_gate_up", "w_down", "bias_gate_up", "bias_down")


class ExpertWeights:
    """The layer's own expert tensors, checked for writing: see `read`."""

    def __init__(
        self, w_gate_up: Tensor, w_down: Tensor, bias_gate_up: Tensor | None, bias_down: Tensor | None
    ) -> None:
        self.w_gate_up = w_gate_up
        self.w_down = w_down
        self.bias_gate_up = bias_gate_up
        self.bias_down = bias_down
        self.num_local = w_down.shape[0]
        self.width = w_down.shape[2]

    @classmethod
    def read(cls, converter: str, weights: Mapping[str, Tensor], *, gated: bool) -> ExpertWeights:
        """Takes w_gate_up [L, 2I, H] ([L, I, H] not gated), w_down [L, H, I] and both or none of the biases.

        Raises:
            CheckpointKeyError: a key is missing (one bias without the other too) or surplus.
            ValueError: shapes that do not fit together.
        """
        reader = Reader(converter, weights)
        biased = "bias_gate_up" in weights or "bias_down" in weights
        reader.check_keys(EXPERT_KEYS if biased else EXPERT_KEYS[:2], under="")
        w_down = reader.tensor("w_down", 3)
        num_local, hidden, width = w_down.shape
        rows = 2 * width if gated else width
        w_gate_up = reader.tensor("w_gate_up", 3)
        reader.expect("w_gate_up", w_gate_up, (num_local, rows, hidden), w_gate_up.dtype)
        bias_gate_up = reader.tensor("bias_gate_up", 2) if biased else None
        bias_down = reader.tensor("bias_down", 2) if biased else None
        if bias_gate_up is not None:
            reader.expect("bias_gate_up", bias_gate_up, (num_local, rows), bias_gate_up.dtype)
        if bias_down is not None:
            reader.expect("bias_down", bias_down, (num_local, hidden), bias_down.dtype)
        return cls(w_gate_up, w_down, bias_gate_up, bias_down)
