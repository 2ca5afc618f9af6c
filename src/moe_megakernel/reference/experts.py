"""The experts' work on rows that have already arrived: forward and backward, one expert after the other.

Between dispatch and combine, on one rank, the same for any number of ranks. Owns the loop over experts and the choice
of what is computed for which gradients; the formulas stand in gate_up, activation and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import Activation
from .activation import activate, activate_backward
from .down import down, down_dgrad, down_wgrad, route_weight_grad
from .gate_up import gate_up, gate_up_dgrad, gate_up_wgrad
from .numerics import compute_dtype, rows_dtype


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    topk_weights: bool
    w_gate_up: bool
    w_down: bool
    bias_gate_up: bool
    bias_down: bool

    @property
    def dh(self) -> bool:
        """Whether the gradient of h is needed on the way."""
        return self.x or self.w_gate_up or self.bias_gate_up

    @property
    def da(self) -> bool:
        """Whether the gradient of the activation is needed on the way."""
        return self.dh or self.topk_weights

    def names(self) -> list[str]:
        """Names of the inputs whose gradients are asked for."""
        return [name for name, need in self._asdict().items() if need]


@dataclass(frozen=True)
class Weights:
    """This rank's expert parameters: w_gate_up [L, 2I, H], w_down [L, H, I] and optional biases [L, 2I], [L, H].

    A weight that no computation reads may be None in backward.
    """

    gate_up: Tensor | None
    down: Tensor | None
    bias_gate_up: Tensor | None
    bias_down: Tensor | None


@dataclass
class RowGrads:
    """Backward's results: dx_rows [R, H] and ds_rows [R] by row, the others by expert; None where not asked for."""

    dx_rows: Tensor | None
    ds_rows: Tensor | None
    dw_gate_up: Tensor | None
    dw_down: Tensor | None
    dbias_gate_up: Tensor | None
    dbias_down: Tensor | None


def experts_forward(
    x_rows: Tensor, offsets: Sequence[int], weights: Weights, act: Activation, h_out: Tensor | None
) -> Tensor:
    """gate_up, activation and down over all experts' rows.

    Args:
        x_rows: [R, H], rows of expert e at offsets[e] to offsets[e + 1].
        offsets: L + 1 row offsets.
        weights: all of this rank's parameters.
        act: the activation.
        h_out: [>= R, 2I] to keep h in, or None.

    Returns:
        o rows [R, H].
    """
    assert weights.gate_up is not None
    assert weights.down is not None
    o_rows = torch.empty(x_rows.shape, dtype=rows_dtype(x_rows.dtype), device=x_rows.device)
    for e, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        h = gate_up(x_rows[start:end], weights.gate_up[e], _at(weights.bias_gate_up, e))
        if h_out is not None:
            h_out[start:end] = h
        a = activate(h.to(compute_dtype(h.dtype)), act).to(h.dtype)
        o_rows[start:end] = down(a, weights.down[e], _at(weights.bias_down, e))
    return o_rows


def experts_backward(
    dy_rows: Tensor,
    s_rows: Tensor,
    x_rows: Tensor | None,
    h_rows: Tensor | None,
    offsets: Sequence[int],
    weights: Weights,
    act: Activation,
    needs: Needs,
    accumulate: tuple[Tensor | None, Tensor | None] = (None, None),
) -> RowGrads:
    """down dgrad, activation backward, gate_up dgrad and both wgrads over all experts' rows.

    Args:
        dy_rows: [R, H] gradient of y at each row's token, not scaled by the routing weight.
        s_rows: [R] routing weights.
        x_rows: [R, H]; needed for dW_gate_up, or to recompute h.
        h_rows: [>= R, 2I] from the forward, or None to recompute it.
        offsets: L + 1 row offsets.
        weights: parameters; those that nothing here reads may be None.
        act: the activation.
        needs: which gradients to compute.
        accumulate: float32 buffers for dW_gate_up and dW_down; where one is given the gradient is added to it,
            unrounded, and the result's field is None.

    Returns:
        The gradients; experts without rows get zeros.
    """
    experts, hidden, dtype = len(offsets) - 1, dy_rows.shape[1], dy_rows.dtype
    compute = compute_dtype(dtype)
    width = _h_width(h_rows, weights)
    expert_width = width // act.width_factor
    new = dy_rows.new_zeros
    grads = RowGrads(
        dx_rows=new(dy_rows.shape, dtype=rows_dtype(dtype)) if needs.x else None,
        ds_rows=new(dy_rows.shape[0], dtype=compute) if needs.topk_weights else None,
        dw_gate_up=new(experts, width, hidden) if needs.w_gate_up and accumulate[0] is None else None,
        dw_down=new(experts, hidden, expert_width) if needs.w_down and accumulate[1] is None else None,
        dbias_gate_up=new(experts, width) if needs.bias_gate_up else None,
        dbias_down=new(experts, hidden) if needs.bias_down else None,
    )
    for e, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        rows = slice(start, end)
        dy, s = dy_rows[rows], s_rows[rows].to(compute)[:, None]
        if grads.dbias_down is not None:
            grads.dbias_down[e] = (s * dy.to(compute)).sum(0)
        if not (needs.da or needs.w_down):
            continue
        if h_rows is not None:
            h = h_rows[rows].to(compute)
        else:
            assert x_rows is not None
            assert weights.gate_up is not None
            h = gate_up(x_rows[rows], weights.gate_up[e], _at(weights.bias_gate_up, e)).to(compute)
        a = activate(h, act).to(dtype)
        if needs.w_down:
            dw = down_wgrad(dy, (s * a.to(compute)).to(dtype))
            _put(grads.dw_down, accumulate[1], e, dw)
        if not needs.da:
            continue
        assert weights.down is not None
        da = down_dgrad(dy, weights.down[e])
        if grads.ds_rows is not None:
            grads.ds_rows[rows] = route_weight_grad(da, a, dy, _at(weights.bias_down, e))
        if not needs.dh:
            continue
        dh = activate_backward(s * da, h, act).to(dtype)
        if grads.dbias_gate_up is not None:
            grads.dbias_gate_up[e] = dh.to(compute).sum(0)
        if needs.w_gate_up:
            assert x_rows is not None
            _put(grads.dw_gate_up, accumulate[0], e, gate_up_wgrad(dh, x_rows[rows]))
        if grads.dx_rows is not None:
            assert weights.gate_up is not None
            grads.dx_rows[rows] = gate_up_dgrad(dh, weights.gate_up[e])
    return grads


def _h_width(h_rows: Tensor | None, weights: Weights) -> int:
    if h_rows is not None:
        return h_rows.shape[1]
    assert weights.gate_up is not None
    return weights.gate_up.shape[1]


def _at(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]


def _put(out: Tensor | None, accumulate: Tensor | None, e: int, grad: Tensor) -> None:
    """Rounds one expert's weight gradient into `out`, or adds it unrounded to `accumulate`."""
    if accumulate is not None:
        accumulate[e] += grad
    else:
        assert out is not None
        out[e] = grad
