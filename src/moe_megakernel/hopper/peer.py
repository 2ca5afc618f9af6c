"""The `peer` transport: the layer of several ranks in the fused kernels, which read and write each other's memory.

`peer_fault` finds out with the other ranks whether they can share memory; `peer_forward` and `peer_backward` run a
step. Ranks meet on the host only where capacities or memory are not agreed yet: after that a step is launches alone,
and what must be equal is compared on the device. Called by `inner_ops` for groups whose backend is "mega" or "staged".
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..distributed.capacity import agree_first
from ..distributed.group import Group
from ..distributed.layer import BACKWARD, FORWARD, GroupPlan, compare, refused_forward
from ..errors import CapacityError, MismatchError, MoEError
from ..reference.layer import refuse
from ..schemas import Inputs, InputTensors, Options, Saved, unpack_needs
from .backward import Gradients, layer_backward
from .device_status import poll
from .forward import layer_forward
from .launch import PeerCall, device_sms, on_its_device, timeout_ns
from .peer_memory import PeerMemory, device_identity, sharing_fault
from .support import kernel_fault

_EQUAL = {
    "hidden": "hidden width of x",
    "width": "expert width",
    "num_experts": "num_experts",
    "top_k": "top_k",
    "row_capacity": "row_capacity",
    "activation": "activation",
}


#: K, E, H, I, whether w_gate_up has 2I rows, whether the backend is "staged".
LayerSizes = tuple[int, int, int, int, bool, bool]


@lru_cache(maxsize=1024)
def group_bytes(
    max_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    width: int,
    gated: bool,
    staged: bool,
    num_sms: int,
    num_ranks: int,
    row_capacity: int,
) -> tuple[int, int]:
    """Bytes of shared memory and of workspace that every rank of a group needs, for both directions.

    See `moe::hopper_group_bytes`; max_tokens and row_capacity are those that the group has agreed on.
    """
    sizes = (max_tokens, top_k, num_experts, hidden, width, gated, staged, num_sms, num_ranks, row_capacity)
    shared, workspace = torch.ops.moe.hopper_group_bytes(*sizes).tolist()
    return shared, workspace


def peer_fault(group: Group, device: torch.device, asked: str) -> str:
    """Why the ranks of `group` cannot share memory, or "".

    Collective at its first call, where all ranks try it.

    Args:
        group: of two or more ranks.
        device: this rank's.
        asked: the op's `transport`. "auto" does not try between hosts, "peer" does: they may be in one NVLink domain.

    Raises:
        MismatchError: the ranks ask for different transports.
    """
    across_hosts = asked == "peer"
    if group.peer_fault is None or (group.peer_fault and across_hosts and not group.tried_across_hosts):
        with group.step(FORWARD):
            _refuse_first_use_in_capture("memory")
            payloads = group.gate(FORWARD, "transport", {**device_identity(device), "transport": asked})
            mismatch = compare(FORWARD, payloads, {"transport": "transport"})
            if mismatch is not None:
                raise mismatch
            fault = sharing_fault(payloads, across_hosts)
            trial = None
            if not fault:
                try:
                    trial = PeerMemory(group, device, 4096, 4096)
                except RuntimeError as error:
                    fault = str(error).splitlines()[0]
                faults = [p["fault"] for p in group.gate(FORWARD, "mapped", {"fault": fault})]
                fault = next((f"rank {r}: {text}" for r, text in enumerate(faults) if text), "")
            del trial
            group.peer_fault, group.tried_across_hosts = fault, across_hosts
    return group.peer_fault


def _refuse_first_use_in_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise MoEError(
            f"{FORWARD}: {what}: expected it agreed between the ranks before a CUDA graph is captured, got none; "
            "run the layer once, then capture"
        )


def _memory(
    group: Group, op: str, device: torch.device, sizes: LayerSizes, rows: int, act: str, tokens: int
) -> PeerMemory | MismatchError:
    """The group's memory, large enough for a call; made anew by all ranks together where it is not."""
    found = group.peer
    if found is not None and found.device != device:
        raise ValueError(f"{op}: x: expected {found.device}, where the group's memory is, got {device}")
    known = group.max_tokens is not None and group.row_capacity is not None
    if known and found is not None and found.holds(*_needed(group, device, sizes, rows)):
        return found
    _refuse_first_use_in_capture("memory")
    top_k, num_experts, hidden, width, _, _ = sizes
    torch.cuda.synchronize(device)  # so that behind the gate nobody uses what is there now
    poll(device)  # an error of a launch that has just ended would be lost with its record
    payload = {"tokens": tokens, "top_k": top_k, "num_experts": num_experts, "hidden": hidden, "width": width}
    payloads = group.gate(op, "memory", {**payload, "row_capacity": rows, "activation": act})
    mismatch = compare(op, payloads, _EQUAL)
    if mismatch is not None:
        return mismatch
    agree_first(group, payloads)
    shared, workspace = _needed(group, device, sizes, rows)
    if found is not None:
        shared, workspace = max(shared, found.shared_bytes), max(workspace, found.workspace_bytes)
        if found.captured:
            group.outgrown.append(found)
    group.peer = found = None  # before the larger one is there, so that both never are
    memory = PeerMemory(group, device, shared, workspace)
    group.gate(op, "mapped", {})
    group.peer = memory
    return memory


def _needed(group: Group, device: torch.device, sizes: LayerSizes, rows: int) -> tuple[int, int]:
    assert group.max_tokens is not None
    assert group.row_capacity is not None
    capacity = group.row_capacity if rows < 0 else rows
    # Of all SMs, whatever `set_num_sms` says, so that all ranks come to the same figure; fewer need no more.
    return group_bytes(group.max_tokens, *sizes, device_sms(device.index), group.ranks, capacity)


def _call(group: Group, memory: PeerMemory, op: str, row_capacity: int, needs: int) -> PeerCall:
    assert group.max_tokens is not None
    memory.order(op)
    numbers = memory.numbers(group.max_tokens, row_capacity, needs)
    return PeerCall(numbers, memory.workspace, memory.status.tensor, row_capacity)


@on_its_device
def peer_forward(
    x: Tensor, group: Group, inputs: Inputs, num_experts: int, row_capacity: int, options: Options
) -> tuple[Tensor, Tensor, GroupPlan]:
    """One rank's part of the forward.

    Args:
        x: that of `inputs`.
        group: of two or more ranks, without a `peer_fault`.
        inputs: this rank's tokens and experts, as the kernels take them (`support.kernel_fault`).
        num_experts: E in the whole group.
        row_capacity: rows this rank can receive, or -1 for the agreed figure.
        options: of the op; `backend` is "mega" or "staged".

    Returns:
        y [T, H]; h [row_capacity, 2I] or [0, 2I]; and the plan: `expert_offsets` all -1 if the step was refused,
        `row_order` the home rank and route of every row as the kernels pack them; `route_order` is undefined, `splits`
        num_experts throughout, 0 if the step was refused before a launch.

    Raises:
        CapacityError: row_capacity is more than agreed.
        GroupError: a rank is late where memory is agreed, or the group has failed before. Other errors are raised by a
            later call (`peer_status`), on all ranks alike.
    """
    device, (tokens, top_k) = x.device, inputs.topk_idx.shape
    _, columns, hidden = inputs.w_gate_up.shape
    width = inputs.w_down.shape[2]
    with group.step(FORWARD):
        if group.row_capacity is not None and row_capacity > group.row_capacity:
            raise CapacityError(
                f"{FORWARD}: row_capacity: expected at most the {group.row_capacity} rows agreed, got {row_capacity}; "
                "call moe_megakernel.reserve on every rank"
            )
        sizes = (top_k, num_experts, hidden, width, columns != width, options.backend == "staged")
        memory = _memory(group, FORWARD, device, sizes, row_capacity, options.act.text(), tokens)
        if not isinstance(memory, PeerMemory):
            refuse(device, memory)
            return refused_forward(group, x, inputs.topk_idx, inputs.weights, row_capacity, options.saves_h)
        assert group.row_capacity is not None
        rows = group.row_capacity if row_capacity < 0 else row_capacity
        peer = _call(group, memory, FORWARD, rows, options.needs)
        y, h, expert_offsets, row_route = layer_forward(*inputs, num_experts, *options, peer=peer)
    route_order = inputs.topk_idx.new_empty(tokens * top_k, dtype=torch.int32)
    splits = torch.full((2, group.ranks), num_experts, dtype=torch.int64)
    return y, h, GroupPlan(expert_offsets, row_route, route_order, splits)


def _would_run_in(
    memory: PeerMemory, group: Group, inputs: InputTensors, num_experts: int, rows: int, staged: bool
) -> bool:
    """Whether a call like this one, with right arguments, needs no more memory than there is; if in doubt, yes."""
    _, topk_idx, _, w_gate_up, w_down, *_ = inputs
    if (topk_idx.dim(), w_gate_up.dim(), w_down.dim()) != (2, 3, 3):
        return True
    _, hidden, width = w_down.shape
    if kernel_fault(w_down.dtype, hidden, width, num_experts):
        return False
    sizes = (topk_idx.shape[1], num_experts, hidden, width, w_gate_up.shape[1] != width, staged)
    try:
        return memory.holds(*_needed(group, memory.device, sizes, rows))
    except RuntimeError:  # sizes that no call can have
        return True


def refuse_step(
    group: Group, inputs: InputTensors, num_experts: int, row_capacity: int, transport: str, backend: str
) -> bool:
    """Tells the other ranks that this one refuses a forward of its own accord; False if they would not hear of it here.

    A group that has failed is told nothing: the refused arguments are the error that counts.

    Args:
        group: of two or more ranks.
        inputs, num_experts, row_capacity: the refused ones. The other ranks' are taken to be of the same sizes.
        transport, backend: the op's, as they were asked for.
    """
    memory = group.peer
    if memory is None or memory.device != inputs[0].device or transport == "collective" or backend == "reference":
        return False
    if not _would_run_in(memory, group, inputs, num_experts, row_capacity, backend == "staged"):
        return False
    with suppress(MoEError), group.step(FORWARD), torch.cuda.device(memory.device):
        peer = _call(group, memory, FORWARD, 0, 0)
        torch.ops.moe.hopper_group_refuse(peer.workspace, peer.status, peer.group, timeout_ns())
    return True


def _nan_gradients(saved: Saved, main_grads: tuple[Tensor | None, Tensor | None], options: Options) -> Gradients:
    """Of a step that was refused before its launch."""
    (hidden, columns), experts = (saved.dy.shape[1], saved.h.shape[1]), saved.expert_offsets.shape[0] - 1
    width = columns // options.act.width_factor
    needs, new = unpack_needs(options.needs), saved.dy.new_full
    for main_grad in main_grads:
        if main_grad is not None:
            main_grad.fill_(torch.nan)
    shapes = (
        (needs.x, saved.dy.shape),
        (needs.topk_weights, saved.topk_weights.shape),
        (needs.w_gate_up and main_grads[0] is None, (experts, columns, hidden)),
        (needs.w_down and main_grads[1] is None, (experts, hidden, width)),
        (needs.bias_gate_up, (experts, columns)),
        (needs.bias_down, (experts, hidden)),
    )
    grads = [new(shape if asked else (0,), torch.nan) for asked, shape in shapes]
    if needs.topk_weights:
        grads[1] = grads[1].float()
    return tuple(grads)  # type: ignore[return-value]


@on_its_device
def peer_backward(
    dy: Tensor,
    group: Group,
    saved: Saved,
    plan: GroupPlan,
    main_grads: tuple[Tensor | None, Tensor | None],
    options: Options,
) -> Gradients:
    """One rank's part of the backward.

    Args:
        dy: that of `saved`.
        group, options: as in `peer_forward`.
        saved, plan: what the forward has saved, and its inputs.
        main_grads: of w_gate_up and w_down, None where the gradient is returned.

    Raises:
        MoEError: the group has no memory, because it was rebuilt after the forward.
        GroupError: the group has failed.
    """
    poll(dy.device)
    num_experts = int(plan.splits[0, 0])
    with group.step(BACKWARD):
        if num_experts == 0:
            return _nan_gradients(saved, main_grads, options)
        memory = group.peer
        if memory is None:
            raise MoEError(f"{BACKWARD}: group {group.name}: expected no rebuild between forward and backward, got one")
        peer = _call(group, memory, BACKWARD, plan.row_order.shape[0], options.needs)
        given: tuple[Any, ...] = (*saved, plan.row_order, *main_grads, *options)
        return layer_backward(*given, peer=peer, group_experts=num_experts)  # type: ignore[misc]
