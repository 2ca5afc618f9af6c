"""The router: scores every expert for every token and chooses top_k of them, ahead of the `route` stage.

Owns the choice (which experts, which weights) and its small module; the balancing of experts is in `balance.py`. Called
by `module.MoE`, or by models that keep their own layer around the op.

Shape suffixes: T tokens (any leading dimensions), E experts in the group, K top_k, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .balance import bias_step

SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("top2_sum", "max")

# Keeps 0 / 0 out of the renormalisation when every chosen sigmoid underflows; below the last bit of any usual sum.
_TINY = 1e-20


class Routing(NamedTuple):
    """What the router decided: `topk_idx` [..., K] int64, `topk_weights` [..., K] and `logits` [..., E] in fp32.

    With fp64 input the weights and logits are fp64. The logits carry gradients, for the losses in `balance.py`.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    logits: Tensor


def stable_topk(values: Tensor, k: int) -> Tensor:
    """Indices [..., k] (int64) of the k largest of `values` [..., N], largest first; equal values: lowest index first.

    `torch.topk` leaves the order of equal values open, so a recomputed forward could choose other experts.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def _keep_top_groups(choice_TE: Tensor, num_groups: int, top_groups: int, group_score: str) -> Tensor:
    """Sets the values outside the `top_groups` best groups to -inf."""
    num_experts = choice_TE.shape[-1]
    grouped = choice_TE.unflatten(-1, (num_groups, num_experts // num_groups))
    best = min(2 if group_score == "top2_sum" else 1, num_experts // num_groups)
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept = kept.scatter(-1, stable_topk(group_scores, top_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


def check_choice(
    num_experts: int,
    top_k: int,
    *,
    scores: str,
    num_groups: int,
    top_groups: int | None,
    group_score: str,
) -> None:
    """Raises ValueError where these settings cannot choose `top_k` of `num_experts`."""
    if scores not in SCORES:
        raise ValueError(f"router: scores: expected one of {', '.join(SCORES)}, got {scores!r}")
    if group_score not in GROUP_SCORES:
        raise ValueError(f"router: group_score: expected one of {', '.join(GROUP_SCORES)}, got {group_score!r}")
    if num_experts < 1:
        raise ValueError(f"router: num_experts: expected at least 1, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"router: top_k: expected 1 <= top_k <= num_experts = {num_experts}, got {top_k}")
    if num_groups < 1 or num_experts % num_groups != 0:
        raise ValueError(f"router: num_groups: expected a divisor of num_experts = {num_experts}, got {num_groups}")
    kept = num_groups if top_groups is None else top_groups
    if not 1 <= kept <= num_groups:
        raise ValueError(f"router: top_groups: expected 1 <= top_groups <= num_groups = {num_groups}, got {kept}")
    reachable = kept * (num_experts // num_groups)
    if top_k > reachable:
        raise ValueError(f"router: top_k: expected at most the {reachable} experts of the kept groups, got {top_k}")


def choose_experts(
    logits: Tensor,
    top_k: int,
    *,
    scores: str = "softmax",
    score_before_topk: bool = True,
    renormalize: bool = False,
    correction_bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    group_score: str = "top2_sum",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Chooses experts from router logits; equal values are taken in ascending expert order.

    Some published routers in these terms:

    * Qwen3-MoE, Mixtral: softmax, renormalize (Qwen2-MoE: without).
    * GPT-OSS: softmax with score_before_topk=False: the softmax runs over the chosen logits only.
    * DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid, renormalize, correction_bias, num_groups=8, top_groups=4,
      scale=2.5. A group's score is the sum of its two best biased scores; experts of other groups cannot be chosen.
    * DeepSeek-V2 (arXiv 2405.04434, section 2.2.2): softmax, num_groups=8, top_groups=3, group_score="max", scale=16.

    Args:
        logits: [..., E]; computed on in fp32 (fp64 stays fp64).
        top_k: experts per token, K.
        scores: "softmax" over the experts, or "sigmoid" of each.
        score_before_topk: True scores all experts and chooses by score. False chooses by logit and scores the chosen.
        renormalize: divide the chosen scores by their sum (before `scale`).
        correction_bias: [E], added for the choice alone: never part of a weight, never given a gradient.
        num_groups: experts form this many equal groups of neighbours.
        top_groups: groups a token may choose from; None keeps all.
        group_score: "top2_sum" or "max" of the group's values.
        scale: factor on every weight (`routed_scaling_factor` in checkpoints' configurations).

    Returns:
        topk_idx [..., K] int64 and topk_weights [..., K] fp32 (fp64), both in descending order of the choice.

    Raises:
        ValueError: settings that cannot choose top_k experts.
    """
    num_experts = logits.shape[-1]
    check_choice(
        num_experts, top_k, scores=scores, num_groups=num_groups, top_groups=top_groups, group_score=group_score
    )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    score: Callable[[Tensor], Tensor] = torch.sigmoid if scores == "sigmoid" else (lambda z: torch.softmax(z, dim=-1))
    basis = score(wide) if score_before_topk else wide

    choice = basis.detach()
    if correction_bias is not None:
        choice = choice + correction_bias.detach()
    if top_groups is not None and top_groups < num_groups:
        choice = _keep_top_groups(choice, num_groups, top_groups, group_score)
    topk_idx = stable_topk(choice, top_k)

    weights = basis.gather(-1, topk_idx)
    if not score_before_topk:
        weights = score(weights)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    if scale != 1.0:
        weights = weights * scale
    return topk_idx, weights


class Router(nn.Module):
    """A linear map to logits and the choice of `choose_experts`, always in fp32, under autocast too.

    State dict: `weight` [E, H]; with `bias` also `bias` [E]; with `correction_bias` also `correction_bias` [E] fp32, a
    buffer that stays fp32 whatever dtype the module is cast to (its steps of 0.001 would vanish in bf16).

    `renormalize=None` renormalises when top_k > 1: a single renormalised weight is the constant 1, through which the
    router would get no gradient. All other arguments are those of `choose_experts`; `dtype` is that of the parameters.
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        score_before_topk: bool = True,
        renormalize: bool | None = None,
        bias: bool = False,
        correction_bias: bool = False,
        num_groups: int = 1,
        top_groups: int | None = None,
        group_score: str = "top2_sum",
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice(
            num_experts, top_k, scores=scores, num_groups=num_groups, top_groups=top_groups, group_score=group_score
        )
        self.hidden = hidden
        self.num_experts = num_experts
        self.top_k = top_k
        self.scores = scores
        self.score_before_topk = score_before_topk
        self.renormalize = top_k > 1 if renormalize is None else renormalize
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.group_score = group_score
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        correction = torch.zeros(num_experts, device=device, dtype=torch.float32) if correction_bias else None
        self.register_buffer("correction_bias", correction)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None, std: float | None = None) -> None:
        """Draws the weight from N(0, std^2), or like nn.Linear from U(-1/sqrt(H), 1/sqrt(H)); zeroes both biases."""
        with torch.no_grad():
            draw_(self.weight, self.hidden, generator, std)
            if self.bias is not None:
                self.bias.zero_()
            if self.correction_bias is not None:
                self.correction_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Routes x [..., H]; see `Routing`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # Autocast does not know the meta device.
        plain = contextlib.nullcontext() if x.is_meta else torch.autocast(device_type=x.device.type, enabled=False)
        with plain:
            bias = None if self.bias is None else self.bias.to(wide)
            logits = nn.functional.linear(x.to(wide), self.weight.to(wide), bias)
            topk_idx, topk_weights = choose_experts(
                logits,
                self.top_k,
                scores=self.scores,
                score_before_topk=self.score_before_topk,
                renormalize=self.renormalize,
                correction_bias=self.correction_bias,
                num_groups=self.num_groups,
                top_groups=self.top_groups,
                group_score=self.group_score,
                scale=self.scale,
            )
        return Routing(topk_idx, topk_weights, logits)

    @torch.no_grad()
    def update_correction_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """One step of balancing without a loss: see `balance.bias_step`. Call it once per optimiser step.

        Args:
            counts: [E] routes per expert since the last update, **summed over every rank that shares this router**, so
                that all of them keep the same bias.
            rate: the step (DeepSeek-V3 used 0.001).
        """
        if self.correction_bias is None:
            raise ValueError("router: correction_bias: expected a router built with correction_bias=True, got False")
        if counts.shape != (self.num_experts,):
            raise ValueError(f"router: counts: expected shape ({self.num_experts},), got {tuple(counts.shape)}")
        self.correction_bias.add_(bias_step(counts.to(self.correction_bias.device), rate))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # nn.Module casts every floating buffer; the bias follows to the new device and keeps its fp32 values.
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.correction_bias = before.to(device=after.device)
        return self

    def extra_repr(self) -> str:
        shown: dict[str, Any] = {"scores": self.scores, "renormalize": self.renormalize}
        if not self.score_before_topk:
            shown["score_before_topk"] = False
        if self.top_groups is not None:
            shown.update(num_groups=self.num_groups, top_groups=self.top_groups)
        if self.scale != 1.0:
            shown["scale"] = self.scale
        head = f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}"
        return ", ".join((head, *(f"{key}={value}" for key, value in shown.items())))


def draw_(target: Tensor, fan_in: int, generator: torch.Generator | None, std: float | None) -> None:
    """Fills `target` with one draw in fp32: N(0, std^2), or U(-1/sqrt(fan_in), 1/sqrt(fan_in)) where std is None.

    Drawn on the generator's device (without one: the target's) and then cast, so that every dtype gets the same draw.
    Nothing happens on the meta device.
    """
    if target.is_meta or target.numel() == 0:
        return
    device = target.device if generator is None else generator.device
    values = torch.empty(target.shape, device=device, dtype=torch.float32)
    if std is None:
        bound = fan_in**-0.5
        values.uniform_(-bound, bound, generator=generator)
    else:
        values.normal_(0.0, std, generator=generator)
    target.copy_(values)
