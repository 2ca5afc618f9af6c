"""The op `torch.ops.moe.dispatch_gemm_combine`. Importing this module registers it and everything under it.

Composite: it checks arguments, settles dtypes, backend, transport and capacity, and calls one inner forward op, which
settles a transport that is still "auto" with the other ranks. One rank uses the pure `layer_forward`, several ranks
`group_forward`, an ordered effect, so that a compiler neither merges nor drops a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import autograd as _autograd  # noqa: F401  (registers gradients)
from . import checks, contexts
from . import fake as _fake  # noqa: F401  (registers fakes)
from . import inner_ops as _inner_ops  # noqa: F401  (registers implementations)
from .activations import resolve_activation
from .backends import select_backend, select_transport
from .distributed.dtensor import local_weight, refuse_dtensor
from .distributed.group import get_group, group_rank, group_ranks
from .distributed.layer import FORWARD
from .errors import MoEError
from .hopper.peer import refuse_step
from .hopper.support import device_capability, kernel_fault, settle_backend
from .reference.numerics import compute_dtype
from .schemas import Inputs, InputTensors, lib, packed_needs

#: Types without a meaning of their own, which most calls bring.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _autocasts(tensor: Tensor) -> bool:
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def _autocast(tensor: Tensor | None) -> Tensor | None:
    """Casts a floating tensor to the autocast dtype where autocast is on; float64 is left alone, as PyTorch does."""
    if tensor is None or not _autocasts(tensor) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if tensor.is_floating_point() else tensor


def _settle(inputs: Inputs, group_name: str) -> Inputs:
    """Unwraps DTensor weights and applies autocast; routing weights and main gradients keep their dtype."""
    for name in ("x", "topk_idx", "topk_weights", "main_grad_gate_up", "main_grad_down"):
        refuse_dtensor(name, getattr(inputs, name))
    settled: dict[str, Any] = {"x": _autocast(inputs.x)}
    main_grads = {"w_gate_up": inputs.main_grad_gate_up, "w_down": inputs.main_grad_down}
    for name in ("w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            tensor = _autocast(local_weight(name, tensor, group_name, main_grads.get(name) is not None))
        settled[name] = tensor
    return inputs._replace(**settled)


def _dispatch_gemm_combine(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    main_grad_gate_up: Tensor | None = None,
    main_grad_down: Tensor | None = None,
    *,
    num_experts: int,
    group_name: str = "",
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    backend: str = "auto",
    transport: str = "auto",
    row_capacity: int = -1,
    recompute: bool = False,
) -> Tensor:
    inputs: InputTensors  # named only where a call is not an ordinary one
    inputs = (x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, main_grad_gate_up, main_grad_down)
    plain = _PLAIN.issuperset(map(type, inputs))
    ranks = group_ranks(group_name)
    device = x.device
    kind = device.type
    try:
        usable = select_backend(backend, kind, device_capability(device))
        transport = select_transport(transport, kind)
        if not plain or (kind != "meta" and torch.is_autocast_enabled(kind)):
            inputs = _settle(Inputs(*inputs), group_name)
        act = resolve_activation(activation, alpha, limit)
        if not (plain and ranks == 1 and row_capacity >= -1 and checks.surely_fits(inputs, num_experts, act)):
            checks.check_arguments(Inputs(*inputs), num_experts, group_rank(group_name), ranks, act, row_capacity)
    except (TypeError, ValueError) as error:
        if ranks > 1 and not _tracing(x):
            state = get_group(group_name)  # the others wait for this rank, on the device or in the store
            if not refuse_step(state, inputs, num_experts, row_capacity, transport, backend):
                state.report(FORWARD, "route", error)
        raise
    settled = inputs[0]
    if usable != "reference":
        fault = kernel_fault(settled.dtype, settled.shape[1], inputs[4].shape[2], num_experts)
        if fault:
            usable = settle_backend(backend, usable, fault)
    scores_dtype = compute_dtype(settled.dtype)
    if topk_weights.dtype != scores_dtype:
        inputs = Inputs(*inputs)._replace(topk_weights=topk_weights.to(scores_dtype))
    needs = packed_needs(inputs) if torch.is_grad_enabled() else 0
    options = (act.name, act.alpha, act.limit, usable, needs, recompute)
    if ranks == 1:
        if contexts.any_kept() and kind == "cuda" and usable != "reference" and not _recorded(x):
            y: Tensor = torch.ops.moe.layer_forward_direct.default(*inputs, num_experts, *options)[0]
            if y.dim() == 2:  # else it was not to be done without Python
                return y
        return torch.ops.moe.layer_forward.default(*inputs, num_experts, *options)[0]
    if (main_grad_gate_up is not None or main_grad_down is not None) and _tracing(x):
        raise MoEError(
            f"{checks.OP}: main_grad: expected None in a compiled region with a group of several ranks, got a tensor; "
            "call the op outside the compiled region or let autograd return the weight gradients"
        )
    if row_capacity < 0:
        # A trace keeps the figure of its own time; the other ranks are never asked while tracing.
        agreed = get_group(group_name).row_capacity
        row_capacity = -1 if agreed is None else agreed
    return torch.ops.moe.group_forward(*inputs, num_experts, group_name, transport, row_capacity, *options)[0]


def _tracing(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def _recorded(x: Tensor) -> bool:
    """Whether somebody may take down what the op calls, to call it again: that must be an op which never refuses."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None or _tracing(x)


lib.impl("dispatch_gemm_combine", _dispatch_gemm_combine, "CompositeImplicitAutograd")
