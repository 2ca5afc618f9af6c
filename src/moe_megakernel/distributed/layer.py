"""The layer over several ranks by the `collective` transport: the reference stages with the exchange between them.

Implements the inner ops `moe::group_forward` and `moe::group_backward` where the ranks do not share memory; else
`hopper.peer` does. Every rank calls them in the same order; what
must be equal is compared at the first gate of a call, before any row moves. The experts' work between the two exchanges
is that of the backend: `reference.experts`, or the fused kernels through `hopper.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation
from ..errors import MismatchError, MoEError, RoutingError
from ..hopper.rows import rows_backward, rows_forward, rows_of_tokens
from ..reference.combine import combine, scatter_rows
from ..reference.dispatch import gather_rows, gather_weights
from ..reference.experts import Needs, RowGrads, Weights, experts_backward, experts_forward
from ..reference.layer import fill_nan, new_h, refuse, routing_error
from .capacity import agree
from .exchange import Collective, RowPlan, plan_rows
from .group import Group
from .partition import expert_range

#: Names of the two calls, in messages and at gates.
FORWARD = "dispatch_gemm_combine"
BACKWARD = "dispatch_gemm_combine backward"


@dataclass(frozen=True)
class GroupPlan:
    """What backward needs of the forward's routing, as the tensors that the inner op returns.

    expert_offsets: int32 [L + 1] (-1 if the step was refused). row_order: int32 [row_capacity], see `RowPlan`, then -1.
    route_order: int32 [T * K], this rank's routes in the order they were sent, then -1. splits: int64 [2, W] on CPU,
    rows sent to and received from each rank. `hopper.peer` fills the last three otherwise, see `peer_forward`.
    """

    expert_offsets: Tensor
    row_order: Tensor
    route_order: Tensor
    splits: Tensor


def compare(op: str, payloads: list[dict[str, Any]], argument: dict[str, str]) -> MismatchError | None:
    """The error for the first field that is not equal on all ranks; `argument` maps fields to what users call them."""
    for field, name in argument.items():
        values = [p.get(field) for p in payloads]
        for r, value in enumerate(values):
            if value != values[0]:
                return MismatchError(
                    f"{op}: {name}: expected the same on all ranks, got {values[0]} on rank 0 and {value} on rank {r}"
                )
    return None


_EQUAL_IN_FORWARD = {
    "hidden": "hidden width of x",
    "width": "expert width",
    "num_experts": "num_experts",
    "top_k": "top_k",
    "dtype": "dtype",
    "row_capacity": "row_capacity",
    "activation": "activation",
    "gradients": "inputs that require grad",
}
_EQUAL_IN_BACKWARD = {
    "hidden": "hidden width of dy",
    "needs": "gradients asked for",
    "sends_x": "recompute or frozen weights",
}


def group_forward(
    group: Group,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    weights: Weights,
    num_experts: int,
    act: Activation,
    row_capacity: int,
    gradients: list[str],
    save_h: bool,
    backend: str,
) -> tuple[Tensor, Tensor, GroupPlan]:
    """One rank's part of the forward.

    Args:
        group: of two or more ranks.
        x, topk_idx, topk_weights: this rank's tokens, as in `reference.layer.layer_forward`; ids are global.
        weights: this rank's experts' parameters.
        num_experts: E in the whole group.
        act: the activation.
        row_capacity: rows this rank can receive, or -1 for the agreed figure.
        gradients: names of the inputs that want gradients; must be equal on all ranks.
        save_h: whether h is returned, else it is [0, 2I].
        backend: which experts' code runs: "reference", "mega" or "staged".

    Returns:
        y [T, H], h [row_capacity, 2I] and the plan.

    Raises:
        RoutingError, CapacityError, MismatchError: on all ranks alike (on CUDA deferred, y is NaN).
        GroupError: a rank is late, has raised or died.
    """
    op = FORWARD
    assert weights.gate_up is not None
    with group.step(op):
        route_order, class_counts, first_bad = torch.ops.moe.route(topk_idx, num_experts)
        bad = int(first_bad)
        per_expert = class_counts.sum(1).tolist()
        ranges = [expert_range(num_experts, r, group.ranks) for r in range(group.ranks)]
        sends = [sum(per_expert[q.start : q.stop]) for q in ranges]
        routes = route_order[: sum(sends)]
        # Everything local comes before the gate: a rank that fails in it leaves the others at the gate, not in a
        # collective.
        x_sent = gather_rows(x, routes, topk_idx.shape[1])
        status = "" if bad < 0 else str(routing_error(op, topk_idx, bad, num_experts, group.rank))
        payloads = group.gate(
            op,
            "route",
            {
                "status": status,
                "tokens": x.shape[0],
                "hidden": x.shape[1],
                "width": weights.gate_up.shape[1],
                "num_experts": num_experts,
                "top_k": topk_idx.shape[1],
                "dtype": str(x.dtype),
                "row_capacity": row_capacity,
                "activation": act.text(),
                "gradients": gradients,
                "sends": sends,
            },
        )
        decision = _decide_forward(group, op, payloads)
        if isinstance(decision, MoEError):
            refuse(x.device, decision)
            return refused_forward(group, x, topk_idx, weights, row_capacity, save_h)
        exchange = Collective(group, op, x.device)
        counts = exchange.all_gather("route", class_counts)
        starts = [sum(p["tokens"] for p in payloads[:r]) for r in range(group.ranks)]
        plan = plan_rows(counts, starts, group.rank)
        saved = _saved_plan(plan, route_order, decision, x.device)
        order = _arrival_order(saved.row_order[: sum(plan.receive)], backend)
        x_rows = exchange.all_to_all("dispatch", x_sent, plan.send, plan.receive).index_select(0, order)
        h = new_h(x, decision if save_h else 0, x_rows.shape[0], weights.gate_up.shape[1])
        h_out = h if save_h else None
        if backend == "reference":
            o_rows = experts_forward(x_rows, plan.expert_offsets.tolist(), weights, act, h_out)
        else:
            o_rows = rows_forward(x_rows, saved.expert_offsets, weights, act, h_out, backend)
        (o_sent,) = _send_back(group, exchange, op, order, plan.receive, plan.send, [o_rows])
        o = scatter_rows(o_sent, routes, topk_idx.numel()).view(*topk_idx.shape, x.shape[1])
        return combine(o, topk_weights, topk_idx, x.dtype), h, saved


def group_backward(
    group: Group,
    dy: Tensor,
    x: Tensor | None,
    topk_weights: Tensor,
    weights: Weights,
    h: Tensor,
    saved: GroupPlan,
    act: Activation,
    needs: Needs,
    recompute: bool,
    accumulate: tuple[Tensor | None, Tensor | None],
    backend: str,
) -> tuple[Tensor | None, Tensor | None, RowGrads]:
    """One rank's part of the backward; arguments and results as in `reference.layer.layer_backward`.

    Args:
        backend: that of the forward.

    Raises:
        MismatchError: a rank runs another call or asks for other gradients.
        GroupError: a rank is late, has raised or died.
    """
    op = BACKWARD
    (tokens, top_k), device = topk_weights.shape, dy.device
    with group.step(op):
        refused = int(saved.expert_offsets[0]) < 0
        send, receive = ([0] * group.ranks, [0] * group.ranks) if refused else saved.splits.tolist()
        order = _arrival_order(saved.row_order[: sum(receive)], backend)
        routes = saved.route_order[: sum(send)]
        sent = [gather_rows(dy, routes, top_k), gather_weights(topk_weights, routes)]
        sent += [] if x is None else [gather_rows(x, routes, top_k)]
        payloads = group.gate(op, "route", {"hidden": dy.shape[1], "needs": needs.names(), "sends_x": x is not None})
        mismatch = compare(op, payloads, _EQUAL_IN_BACKWARD)
        if mismatch is not None:
            refuse(device, mismatch)
        refused = refused or mismatch is not None
        exchange = Collective(group, op, device)
        if refused:
            pulled = [rows[:0] for rows in sent]
        else:
            arrived = [exchange.all_to_all("dispatch", rows, send, receive) for rows in sent]
            pulled = [rows.index_select(0, order) for rows in arrived]
        given = (pulled[0], pulled[1], None if x is None else pulled[2], None if recompute else h)
        if backend == "reference":
            offsets = [0] * saved.expert_offsets.shape[0] if refused else saved.expert_offsets.tolist()
            grads = experts_backward(*given, offsets, weights, act, needs, accumulate)
        else:
            grads = rows_backward(*given, saved.expert_offsets, weights, act, needs, accumulate, backend)
        going = [rows for rows in (grads.dx_rows, grads.ds_rows) if rows is not None]
        if not refused:
            going = _send_back(group, exchange, op, order, receive, send, going)
        home = [scatter_rows(rows, routes if not refused else routes[:0], tokens * top_k) for rows in going]
        dtopk_weights = home.pop().view(tokens, top_k) if grads.ds_rows is not None else None
        dx = None
        if grads.dx_rows is not None:
            dx = combine(home.pop().view(tokens, top_k, dy.shape[1]), None, None, dy.dtype)
        if refused:
            fill_nan(dx, dtopk_weights, grads, accumulate)
        return dx, dtopk_weights, grads


def _decide_forward(group: Group, op: str, payloads: list[dict[str, Any]]) -> int | MoEError:
    """The capacity of this call, or the error that every rank raises: all ranks decide from the same payloads."""
    mismatch = compare(op, payloads, _EQUAL_IN_FORWARD)
    if mismatch is not None:
        return mismatch
    for payload in payloads:
        if payload["status"]:
            return RoutingError(payload["status"])
    return agree(group, op, payloads)


def _arrival_order(row_order: Tensor, backend: str) -> Tensor:
    """For each row its place in the receive buffer: in expert order, or as the kernels' tokens hold the rows."""
    if backend == "reference":
        return row_order
    return row_order.index_select(0, rows_of_tokens(row_order.shape[0], row_order.device))


def _send_back(
    group: Group,
    exchange: Collective,
    op: str,
    order: Tensor,
    send: list[int],
    receive: list[int],
    kinds: list[Tensor],
) -> list[Tensor]:
    """Sends rows back to where they came from; they arrive in the order their owner sent them.

    `order` is what they were pulled by, `_arrival_order`; `send` and `receive` are those of this way.
    """
    if not kinds:
        return []
    going = [torch.empty_like(rows).index_copy_(0, order.long(), rows) for rows in kinds]
    group.gate(op, "combine", {})
    return [exchange.all_to_all("combine", rows, send, receive) for rows in going]


def _saved_plan(plan: RowPlan, route_order: Tensor, capacity: int, device: torch.device) -> GroupPlan:
    row_order = _minus_ones(capacity, device)
    row_order[: plan.row_order.shape[0]] = plan.row_order.to(device)
    return GroupPlan(
        plan.expert_offsets.to(device),
        row_order,
        route_order,
        torch.tensor([plan.send, plan.receive], dtype=torch.int64),
    )


def refused_forward(
    group: Group, x: Tensor, topk_idx: Tensor, weights: Weights, row_capacity: int, save_h: bool
) -> tuple[Tensor, Tensor, GroupPlan]:
    """NaN outputs of a step whose error is raised later (CUDA)."""
    assert weights.gate_up is not None
    capacity = max(0, row_capacity if row_capacity >= 0 else group.row_capacity or 0)
    experts, width = weights.gate_up.shape[:2]
    h = new_h(x, capacity if save_h else 0, 0, width)
    plan = GroupPlan(
        _minus_ones(experts + 1, x.device),
        _minus_ones(capacity, x.device),
        _minus_ones(topk_idx.numel(), x.device),
        torch.zeros(2, group.ranks, dtype=torch.int64),
    )
    return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format), h, plan


def _minus_ones(size: int, device: torch.device) -> Tensor:
    return torch.full((size,), -1, dtype=torch.int32, device=device)
