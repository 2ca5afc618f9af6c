"""Gradients of the inner ops, registered with `torch.library`; ordered effects of those that talk to other ranks.

Saves only what the asked-for gradients read. Backward itself is an op (`layer_backward`, `group_backward`), so that
compilers see one node; its own gradient is refused in words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import OP
from .reference.experts import Needs
from .schemas import EFFECTFUL, lib, pack_needs

_DOUBLE_BACKWARD = (
    f"{OP}: double backward is not supported: gradients of the layer can be taken once "
    "(create_graph=True gives gradients that cannot be differentiated)"
)
#: Positions in the forward ops' inputs whose gradients `Needs` lists, in its order.
_DIFFERENTIABLE = (0, 2, 3, 4, 5, 6)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # By position, as `schemas.read_forward` names them: this runs in every forward.
    x, topk_idx, topk_weights, w_gate_up, w_down, bias_gate_up, bias_down, main_gate_up, main_down, _, *rest = inputs
    *group, activation, alpha, limit, backend, asked, recompute = rest
    _, h, anchor, *plan = output
    flags = ctx.needs_input_grad
    needs = Needs(flags[0], *flags[2:7])
    # `asked` is 0 where the caller saw no gradient coming; then h was not kept and is computed again.
    recompute = recompute or asked == 0
    ctx.needs = needs
    ctx.options = (activation, alpha, limit, backend, pack_needs(needs), recompute)
    ctx.group = group
    # Outside the saved tensors, since backward changes them in place.
    ctx.main_grads = (main_gate_up if needs.w_gate_up else None, main_down if needs.w_down else None)
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(h, *plan)
    ctx.save_for_backward(
        x if needs.w_gate_up or recompute else None,
        topk_idx,
        topk_weights,
        w_gate_up if needs.x or recompute else None,
        w_down if needs.da else None,
        bias_gate_up if recompute else None,
        bias_down if needs.topk_weights else None,
        h,
        anchor,
        *plan,
    )


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * ctx.num_inputs
    kind = "group" if ctx.group else "layer"
    options = (*ctx.group, *ctx.options)
    main_grads = ctx.main_grads
    if main_grads == (None, None):
        grads = getattr(torch.ops.moe, f"{kind}_backward")(dy, *ctx.saved_tensors, *options)
    else:
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_DOUBLE_BACKWARD}; with main_grad not even that")
        given = tuple(dy.new_empty(0) if g is None else g for g in main_grads)
        op = getattr(torch.ops.moe, f"{kind}_backward_accumulate")
        grads = op(dy, *ctx.saved_tensors, *given, *options)
    result: list[Tensor | None] = [None] * ctx.num_inputs
    has_main = {3: main_grads[0] is not None, 4: main_grads[1] is not None}
    for position, need, grad in zip(_DIFFERENTIABLE, ctx.needs, grads, strict=True):
        if need and not has_main.get(position, False):
            result[position] = grad
    return tuple(result)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(_DOUBLE_BACKWARD)


def _register_ordered(name: str) -> None:
    """Tells compilers that calls of the op are ordered and neither merged nor dropped.

    Private API of torch, the same in 2.10 to 2.14.
    """
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(f"moe::{name}", _EffectType.ORDERED)


for _kind in ("layer", "group"):
    torch.library.register_autograd(f"moe::{_kind}_forward", _backward, setup_context=_setup_context, lib=lib)
    torch.library.register_autograd(f"moe::{_kind}_backward", _refuse, lib=lib)
torch.library.register_autograd("moe::layer_forward_direct", _backward, setup_context=_setup_context, lib=lib)
for _name in EFFECTFUL:
    _register_ordered(_name)
