"""The layer as an nn.Module: router, this rank's experts and an optional shared expert.

Holds parameters and passes them on; the numerics are the op's and the router's. This is what a model is built from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor, nn

from .activations import resolve_activation
from .balance import expert_counts
from .distributed.group import group_rank, group_ranks
from .distributed.partition import expert_range
from .functional import group_name_of, moe_layer
from .router import Router, Routing, draw_
from .shared_expert import SharedExpert

if TYPE_CHECKING:
    from .functional import Group


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer: y = sum_k weight_k * expert_k(x) (+ shared expert(x)).

    State dict (L experts of this rank, `self.experts` of E; checkpoint layouts: `moe_megakernel.convert`):

    * `router.weight` [E, H], `router.bias` [E], `router.correction_bias` [E] fp32: the same on every rank;
    * `w_gate_up` [L, 2I, H] (rows 0..I-1 gate; [L, I, H] for relu2), `w_down` [L, H, I];
    * `bias_gate_up` [L, 2I], `bias_down` [L, H] with `bias`;
    * `shared.w_gate_up`, `shared.w_down`, `shared.w_gate`: see `SharedExpert`; the same on every rank.

    `last_expert_counts` [E] int64 (a buffer outside the state dict) holds the routes per expert of this rank's last
    forward. It is overwritten, not added to, so that a recomputed forward leaves it as it was; add it up over ranks and
    microbatches yourself, for instance for `router.update_correction_bias`.

    A parameter with an attribute `main_grad` (fp32, same shape: Megatron's convention) has its gradient added there
    instead of to `.grad`; this holds for `w_gate_up` and `w_down`.

    Gradients are sums over this rank's tokens for the router and the shared expert, and over the whole group's tokens
    for the experts: reduce the former over the group, and neither is averaged.

    The group is kept by name, so the module copies and pickles; a process that loads it needs a group of that name.

    Args:
        hidden: H.
        expert_width: I.
        num_experts: E in the whole group.
        top_k: experts per token.
        activation, alpha, limit: see `moe_megakernel.activations.resolve_activation`.
        bias: biases in the experts.
        scores, score_before_topk, renormalize, router_bias, correction_bias: the router's; see `Router`.
        num_groups, top_groups, group_score, scale: the router's choice; see `choose_experts`.
        shared_expert_width: width of the shared expert; 0 for none.
        shared_expert_gate: multiply the shared expert by the sigmoid of a learned gate.
        group: None (this process holds every expert), a ProcessGroup, its name, or a DeviceMesh of one dimension.
        backend, transport, row_capacity, recompute: the op's; the same on every rank.
        seed: where the initial weights come from; None takes one number from torch's default CPU generator, which must
            then be in the same state on every rank (torch.manual_seed).
        init_std: standard deviation of normal initial weights; None draws as nn.Linear does.
        device, dtype: of the parameters.
        router_dtype: of the router's parameters; None for `dtype`. The router computes in fp32 either way.
    """

    last_expert_counts: Tensor

    def __init__(
        self,
        hidden: int,
        expert_width: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        bias: bool = False,
        scores: str = "softmax",
        score_before_topk: bool = True,
        renormalize: bool | None = None,
        router_bias: bool = False,
        correction_bias: bool = False,
        num_groups: int = 1,
        top_groups: int | None = None,
        group_score: str = "top2_sum",
        scale: float = 1.0,
        shared_expert_width: int = 0,
        shared_expert_gate: bool = False,
        group: Group = None,
        backend: str = "auto",
        transport: str = "auto",
        row_capacity: int = -1,
        recompute: bool = False,
        seed: int | None = None,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        router_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden", hidden), ("expert_width", expert_width)):
            if value < 1:
                raise ValueError(f"MoE: {name}: expected at least 1, got {value}")
        if shared_expert_width < 0:
            raise ValueError(f"MoE: shared_expert_width: expected at least 0, got {shared_expert_width}")
        if shared_expert_gate and not shared_expert_width:
            raise ValueError("MoE: shared_expert_gate: expected a shared_expert_width above 0 with it, got 0")
        self.hidden = hidden
        self.expert_width = expert_width
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.alpha = alpha
        self.limit = limit
        self.group_name = group_name_of(group)
        self.backend = backend
        self.transport = transport
        self.row_capacity = row_capacity
        self.recompute = recompute
        self.seed = seed
        self.init_std = init_std

        self.router = Router(
            hidden,
            num_experts,
            top_k,
            scores=scores,
            score_before_topk=score_before_topk,
            renormalize=renormalize,
            bias=router_bias,
            correction_bias=correction_bias,
            num_groups=num_groups,
            top_groups=top_groups,
            group_score=group_score,
            scale=scale,
            device=device,
            dtype=dtype if router_dtype is None else router_dtype,
        )
        self.experts = expert_range(num_experts, group_rank(self.group_name), group_ranks(self.group_name))
        local = len(self.experts)
        rows = resolve_activation(activation, alpha, limit).width_factor * expert_width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.w_gate_up = parameter(local, rows, hidden)
        self.w_down = parameter(local, hidden, expert_width)
        self.bias_gate_up = parameter(local, rows) if bias else None
        self.bias_down = parameter(local, hidden) if bias else None
        self.shared: SharedExpert | None = None
        if shared_expert_width:
            self.shared = SharedExpert(
                hidden,
                shared_expert_width,
                activation=activation,
                alpha=alpha,
                limit=limit,
                gated_output=shared_expert_gate,
                device=device,
                dtype=dtype,
            )
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("last_expert_counts", counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew from `seed`; the values of an expert do not depend on how many ranks there are.

        Each expert, the router and the shared expert have a generator of their own on the parameters' device: equal
        seeds give equal weights on equal devices. Biases and counts become zero. Does nothing on the meta device; after
        `to_empty` call this.
        """
        seed = int(torch.randint(2**63 - 1, ()).item()) if self.seed is None else self.seed
        if self.w_gate_up.is_meta:
            return
        w_gate_up, w_down = _local(self.w_gate_up), _local(self.w_down)
        device = w_gate_up.device
        with torch.no_grad():
            for row, expert in enumerate(self.experts):
                generator = _stream(seed, expert, device)
                draw_(w_gate_up[row], self.hidden, generator, self.init_std)
                draw_(w_down[row], self.expert_width, generator, self.init_std)
            for bias in (self.bias_gate_up, self.bias_down):
                if bias is not None:
                    _local(bias).zero_()
            self.last_expert_counts.zero_()
        self.router.reset_parameters(_stream(seed, self.num_experts, device), self.init_std)
        if self.shared is not None:
            self.shared.reset_parameters(_stream(seed, self.num_experts + 1, device), self.init_std)

    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, *, return_routing: Literal[True]) -> tuple[Tensor, Routing]: ...

    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        """x [..., H] -> y [..., H], and with `return_routing` also the `Routing`, for auxiliary losses."""
        routing = self.router(x)
        with torch.no_grad():
            self.last_expert_counts.copy_(expert_counts(routing.topk_idx, self.num_experts))
        y = moe_layer(
            x,
            routing.topk_idx,
            routing.topk_weights,
            self.w_gate_up,
            self.w_down,
            self.bias_gate_up,
            self.bias_down,
            num_experts=self.num_experts,
            group=self.group_name,
            activation=self.activation,
            alpha=self.alpha,
            limit=self.limit,
            backend=self.backend,
            transport=self.transport,
            row_capacity=self.row_capacity,
            recompute=self.recompute,
            main_grad_gate_up=_main_grad(self.w_gate_up),
            main_grad_down=_main_grad(self.w_down),
        )
        if self.shared is not None:
            y = y + self.shared(x)
        return (y, routing) if return_routing else y

    def extra_repr(self) -> str:
        parts = [
            f"hidden={self.hidden}, expert_width={self.expert_width}, num_experts={self.num_experts}",
            f"experts=[{self.experts.start}, {self.experts.stop}), top_k={self.top_k}, activation={self.activation}",
        ]
        if self.group_name:
            parts.append(f"group={self.group_name}")
        return ", ".join(parts)


def _stream(seed: int, stream: int, device: torch.device) -> torch.Generator:
    """A generator for one stream of `seed`. The CPU's takes 32 bits, so seeds are mixed and streams then counted up:
    streams of one seed never coincide. The mixing is the finaliser of splitmix64 (Steele et al. 2014)."""
    mask = 2**64 - 1
    mixed = (seed + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    return torch.Generator(device=device).manual_seed((mixed + stream) & 0xFFFFFFFF)


def _main_grad(parameter: Tensor) -> Tensor | None:
    main_grad = getattr(parameter, "main_grad", None)
    return None if main_grad is None else _local(main_grad)


def _local(parameter: Tensor) -> Tensor:
    """The plain tensor that this rank holds of a parameter, which may be a DTensor."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
