"""Implementations of the inner ops on CPU and CUDA: unpack the arguments, run the backend, pack the results.

`layer_*` are pure and for one rank, `group_*` for several. Called through the dispatcher by
`ops.dispatch_gemm_combine` and by `autograd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native, contexts
from . import plan_ops as _plan_ops  # noqa: F401  (schemas of the ops that C++ implements)
from .checks import OP
from .distributed.group import Group, get_group
from .distributed.layer import FORWARD, GroupPlan, group_backward, group_forward
from .errors import MoEError, raise_pending
from .hopper.backward import layer_backward as hopper_layer_backward
from .hopper.forward import layer_forward as hopper_layer_forward
from .hopper.peer import peer_backward, peer_fault, peer_forward
from .reference.experts import RowGrads
from .reference.layer import layer_backward, layer_forward
from .reference.route import route
from .schemas import (
    BACKEND,
    BACKWARD_TENSORS,
    LAYER_ARGUMENTS,
    GroupOptions,
    Options,
    lib,
    read_backward,
    read_forward,
    unpack_needs,
)


def _anchor(x: Tensor) -> Tensor:
    """An empty output of the forward that backward takes as an input.

    It has no elements, so its gradient carries nothing, but it ties the backward op to the graph: without it a second
    differentiation would find no path to the inputs and silently give None instead of being refused.
    """
    return x.new_empty(0)


def _refuse_capture(device: torch.device, backend: str, group: GroupOptions | None = None) -> None:
    """Raises where the host must read row counts but a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        name, got = ("backend", backend) if group is None else ("transport", group.transport)
        raise MoEError(
            f"{OP}: {name}: expected one without host synchronisation while a CUDA graph is captured, got {got!r}"
        )


def _raise_pending(device: torch.device, group: GroupOptions | None) -> None:
    """Raises what an earlier step left, and tells the other ranks, which may have taken their copy of it already."""
    try:
        raise_pending(device)
    except MoEError as error:
        if group is not None:
            get_group(group.group_name).report(FORWARD, "route", error)
        raise


def _peers(group: GroupOptions, options: Options, device: torch.device) -> Group | None:
    """The group if its ranks share memory and the kernels run the call; None: rows travel by collectives.

    Raises:
        ValueError: "peer" was asked for and cannot be, on every rank alike.
    """
    if group.transport == "collective":
        return None
    state = get_group(group.group_name)
    fault = "needs the backend mega or staged" if options.backend == "reference" else ""
    fault = fault or peer_fault(state, device, group.transport)
    if fault and group.transport == "peer":
        raise ValueError(f"{OP}: transport: expected one usable here (collective), got 'peer': {fault}")
    return None if fault else state


def _forward(*args: Any) -> tuple[Tensor, ...]:
    if len(args) == LAYER_ARGUMENTS and args[BACKEND] != "reference":  # unpacked there, without names on the way
        x = args[0]
        since = contexts.generation()
        raise_pending(x.device)
        y, h, expert_offsets, row_route = hopper_layer_forward(*args, since=since)  # type: ignore[misc]  # args end before it
        return y, h, _anchor(x), expert_offsets, row_route
    inputs, num_experts, group, options = read_forward(args)
    peers = None if group is None else _peers(group, options, inputs.x.device)
    _raise_pending(inputs.x.device, None if peers is not None else group)
    if peers is not None and group is not None:
        y, h, saved = peer_forward(inputs.x, peers, inputs, num_experts, group.row_capacity, options)
        return y, h, _anchor(y), saved.expert_offsets, saved.row_order, saved.route_order, saved.splits
    _refuse_capture(inputs.x.device, options.backend, group)
    given = (inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.weights, num_experts, options.act)
    with torch.autocast(inputs.x.device.type, enabled=False):  # it would reach into the matrix products
        if group is None:
            y, h, *plan = layer_forward(*given, options.saves_h)
        else:
            state, gradients = get_group(group.group_name), unpack_needs(options.needs).names()
            y, h, saved = group_forward(state, *given, group.row_capacity, gradients, options.saves_h, options.backend)
            plan = [saved.expert_offsets, saved.row_order, saved.route_order, saved.splits]
    return y, h, _anchor(y), *plan


def _backward(args: tuple[Any, ...], grouped: bool) -> tuple[Tensor, ...]:
    saved, plan, main_grads, group, options = read_backward(args, grouped)
    if group is not None:
        peers = _peers(group, options, saved.dy.device)
        if peers is not None:
            return peer_backward(saved.dy, peers, saved, GroupPlan(saved.expert_offsets, *plan), main_grads, options)
    _refuse_capture(saved.dy.device, options.backend, group)
    given = (saved.dy, saved.x, saved.topk_weights, saved.weights, saved.h)
    rest = (options.act, unpack_needs(options.needs), options.recompute, main_grads)
    with torch.autocast(saved.dy.device.type, enabled=False):
        if group is None:
            (row_route,) = plan
            dx, dtopk_weights, grads = layer_backward(*given, saved.expert_offsets, row_route, *rest)
        else:
            state, group_plan = get_group(group.group_name), GroupPlan(saved.expert_offsets, *plan)
            dx, dtopk_weights, grads = group_backward(state, *given, group_plan, *rest, options.backend)
    return _pack_grads(saved.dy, dx, dtopk_weights, grads)


def _pack_grads(dy: Tensor, dx: Tensor | None, dtopk_weights: Tensor | None, grads: RowGrads) -> tuple[Tensor, ...]:
    """The six results of a backward op; an empty tensor stands for a gradient that was not asked for."""
    parameters = (grads.dw_gate_up, grads.dw_down, grads.dbias_gate_up, grads.dbias_down)
    return tuple(dy.new_empty(0) if g is None else g for g in (dx, dtopk_weights, *parameters))


def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    if args[BACKEND] != "reference":
        given: tuple[Any, ...] = (*args[:BACKWARD_TENSORS], None, None, *args[BACKWARD_TENSORS:])  # no main gradients
        return hopper_layer_backward(*given)
    return _backward(args, grouped=False)


def _layer_backward_accumulate(*args: Any) -> tuple[Tensor, ...]:
    if args[BACKEND] != "reference":
        return hopper_layer_backward(*args)
    return _backward(args, grouped=False)


def _group_backward(*args: Any) -> tuple[Tensor, ...]:
    return _backward(args, grouped=True)


_IMPLEMENTATIONS = {
    "layer_forward": _forward,
    "group_forward": _forward,
    "layer_backward": _layer_backward,
    "layer_backward_accumulate": _layer_backward_accumulate,
    "group_backward": _group_backward,
    "group_backward_accumulate": _group_backward,
}
for _name, _function in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        lib.impl(_name, _function, _key)

# After the schemas. A library that is loaded brings kernels of its own; PyTorch stands in for what is missing.
_native.load()
_native.load_cuda()
for _key in ("CPU", "CUDA"):
    if not torch._C._dispatch_has_kernel_for_dispatch_key("moe::route", _key):
        lib.impl("route", route, _key)
