"""One global batch, split over ranks: what a rank gets of it, and what it must get out of the layer.

The right value is always the layer over the whole batch on one rank, computed in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.distributed.worker import Rank
from tests.steps import Results, make_dy, run_step
from torch import Tensor

import moe_megakernel
from moe_megakernel.testing import DIFFERENTIABLE, LayerInputs, assert_equal_bits

#: Fields that belong to tokens; the others belong to experts.
TOKEN_FIELDS = ("y", "x", "topk_idx", "topk_weights")


@dataclass(frozen=True)
class Share:
    """The part of a batch that one rank brings: its tokens and its experts."""

    tokens: slice
    experts: slice

    def of(self, field: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole batch (or of its gradient)."""
        return tensor[self.tokens if field in TOKEN_FIELDS else self.experts]

    def inputs(self, whole: LayerInputs) -> LayerInputs:
        """This rank's arguments."""
        fields = ("topk_idx", *DIFFERENTIABLE)
        parts = {f: self.of(f, t) for f in fields if (t := getattr(whole, f)) is not None}
        return replace(whole, **parts)

    def results(self, whole: Results) -> Results:
        """This rank's part of the results of the whole batch."""
        return {f: None if t is None else self.of(f, t) for f, t in whole.items()}


def share_of(rank: int, tokens: Sequence[int], num_experts: int) -> Share:
    """The share of `rank` where rank r brings tokens[r] tokens."""
    start = sum(tokens[:rank])
    experts = moe_megakernel.expert_range(num_experts, rank, len(tokens))
    return Share(slice(start, start + tokens[rank]), slice(experts.start, experts.stop))


def all_rows(tokens: Sequence[int], top_k: int) -> int:
    """A row capacity that no routing can overflow."""
    return len(tokens) * max(tokens) * top_k


def group_step(
    rank: Rank,
    whole: LayerInputs,
    tokens: Sequence[int],
    *,
    dy: Tensor | None = None,
    call: Callable[..., Tensor] | None = None,
    requires_grad: dict[str, bool] | None = None,
    **options: Any,
) -> Results:
    """This rank's results of one step of the whole batch on the group.

    Args:
        rank: where it runs.
        whole: the arguments of all ranks together.
        tokens: how many tokens each rank brings.
        dy: gradient of y of all ranks together, by default `make_dy`.
        call: (leaves, **options) -> y; by default the op.
        requires_grad: `name=False` freezes an input.
        options: of the op.
    """
    share = share_of(rank.rank, tokens, whole.num_experts)
    dy = make_dy(whole.x) if dy is None else dy
    options.setdefault("group_name", rank.name)
    run = LayerInputs.call if call is None else call
    return run_step(
        share.inputs(whole), lambda leaves: run(leaves, **options), dy=dy[share.tokens], requires_grad=requires_grad
    )


def check_group(
    rank: Rank, whole: LayerInputs, tokens: Sequence[int], *, expected: Results | None = None, **step: Any
) -> Results:
    """Fails unless this rank's results have the bits of one rank; returns them. Arguments as of `group_step`."""
    if expected is None:
        one = {k: v for k, v in step.items() if k not in ("row_capacity", "group_name")}
        if (call := one.pop("call", None)) is not None:
            one["call"] = call
        expected = run_step(whole, **one)
    actual = group_step(rank, whole, tokens, **step)
    moe_megakernel.check_errors()  # rather than a comparison with NaN
    wanted = share_of(rank.rank, tokens, whole.num_experts).results(expected)
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        assert_equal_bits(tensor, wanted[name], f"{name} on rank {rank.rank}")
    return actual


def reserve_all(rank: Rank, tokens: Sequence[int], top_k: int) -> None:
    """Agrees on capacities that no routing can overflow."""
    moe_megakernel.reserve(rank.group, tokens[rank.rank], top_k, all_rows(tokens, top_k))


def random_tokens(generator: torch.Generator, ranks: int, largest: int) -> list[int]:
    """Token counts of the ranks, 0 included."""
    return torch.randint(0, largest + 1, (ranks,), generator=generator).tolist()
