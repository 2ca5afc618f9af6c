"""The experts' work on rows that have already arrived, in the fused kernels: what `reference.experts` is in PyTorch.

Called by `distributed.layer` between its exchanges. The rows run as a layer of one rank with one route a token: a token
holds a row, its route names the row's expert, and the forward's routing weight is 1, so that the combine returns the
expert's row as it is. The kernels sort routes by (expert, t mod 64, t div 64); tokens are therefore laid out so that
this sort brings every expert its rows in the order they have in `distributed.layer`, on which bits of weight gradients
depend: `rows_of_tokens`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import Activation
from ..reference.experts import Needs, RowGrads, Weights
from ..reference.route import TOKEN_CLASSES
from ..schemas import pack_needs
from .backward import layer_backward
from .forward import layer_forward


def rows_of_tokens(num_rows: int, device: torch.device) -> Tensor:
    """The row that each token holds: a token's place among all of them by (t mod 64, t div 64).

    Returns:
        int32 [R], a permutation of the R rows.
    """
    tokens = torch.arange(num_rows, dtype=torch.int32, device=device)
    classes = tokens % TOKEN_CLASSES
    # A class holds `least` tokens, and one more if it is among the first `larger` ones.
    least, larger = divmod(num_rows, TOKEN_CLASSES)
    return classes * least + classes.clamp(max=larger) + tokens // TOKEN_CLASSES


def _experts_of(rows: Tensor, expert_offsets: Tensor) -> Tensor:
    """topk_idx int32 [R, 1] of tokens that hold `rows`; experts without rows are passed over."""
    return torch.searchsorted(expert_offsets[1:], rows, right=True, out_int32=True)[:, None]


def rows_forward(
    x: Tensor, expert_offsets: Tensor, weights: Weights, act: Activation, h_out: Tensor | None, backend: str
) -> Tensor:
    """gate_up, activation and down over all experts' rows; the twin of `reference.experts.experts_forward`.

    Args:
        x: bfloat16 [R, H], contiguous, token t holding row `rows_of_tokens`[t].
        expert_offsets: int32 [L + 1] on the device of x, rows of each expert.
        weights: all of this rank's parameters, bfloat16.
        act: the activation.
        h_out: [>= R, 2I] to keep h in, in the order of rows; or None.
        backend: "mega" or "staged".

    Returns:
        o [R, H], by token as x.

    Raises:
        RuntimeError: the launch failed. What fails on the device is raised by a later call (`device_status`).
    """
    assert weights.gate_up is not None
    assert weights.down is not None
    num_rows = x.shape[0]
    topk_idx = _experts_of(rows_of_tokens(num_rows, x.device), expert_offsets)
    o, *_ = layer_forward(
        x,
        topk_idx,
        x.new_ones(num_rows, 1, dtype=torch.float32),
        weights.gate_up,
        weights.down,
        weights.bias_gate_up,
        weights.bias_down,
        None,
        None,
        expert_offsets.shape[0] - 1,
        act.name,
        act.alpha,
        act.limit,
        backend,
        0,
        False,
        None if h_out is None else h_out[:num_rows],
    )
    return o


def rows_backward(
    dy: Tensor,
    scores: Tensor,
    x: Tensor | None,
    h_rows: Tensor | None,
    expert_offsets: Tensor,
    weights: Weights,
    act: Activation,
    needs: Needs,
    accumulate: tuple[Tensor | None, Tensor | None],
    backend: str,
) -> RowGrads:
    """All gradients of the experts' work; the twin of `reference.experts.experts_backward`.

    Args:
        dy: bfloat16 [R, H], the gradient of y at each row's token, by token as in `rows_forward`.
        scores: float32 [R], the routing weights of the rows, by token.
        x: as in `rows_forward`; needed for dW_gate_up, or to recompute h.
        h_rows: [>= R, 2I] as `rows_forward` has filled it, or None to compute it again.
        expert_offsets, weights, act, backend: as in `rows_forward`; weights that nothing here reads may be None.
        needs: which gradients to compute.
        accumulate: float32 buffers for dW_gate_up and dW_down; where one is given the gradient is added to it,
            unrounded, and the result's field is None.

    Returns:
        The gradients, `dx_rows` and `ds_rows` by token; experts without rows get zeros.

    Raises:
        RuntimeError: the launch failed. What fails on the device is raised by a later forward.
    """
    num_rows, device = dy.shape[0], dy.device
    if h_rows is None:
        assert weights.gate_up is not None
        h = dy.new_empty(0, weights.gate_up.shape[1])
    else:
        h = h_rows[:num_rows]
    rows = rows_of_tokens(num_rows, device)
    tokens = torch.arange(num_rows, dtype=torch.int32, device=device)
    grads = layer_backward(
        dy,
        x,
        _experts_of(rows, expert_offsets),
        scores[:, None],
        weights.gate_up,
        weights.down,
        weights.bias_gate_up,
        weights.bias_down,
        h,
        dy.new_empty(0),
        expert_offsets,
        torch.empty_like(tokens).index_copy_(0, rows.long(), tokens),  # row_route: the inverse of `rows`
        *accumulate,
        act.name,
        act.alpha,
        act.limit,
        backend,
        pack_needs(needs),
        h_rows is None,
    )
    main_gate_up, main_down = accumulate
    returned = needs._replace(
        w_gate_up=needs.w_gate_up and main_gate_up is None, w_down=needs.w_down and main_down is None
    )
    dx, ds, *parameters = (grad if need else None for grad, need in zip(grads, returned, strict=True))
    return RowGrads(dx, None if ds is None else ds[:, 0], *parameters)
