"""down: the second grouped GEMM of one expert, with bias; forward, dgrad and wgrad.

Called per expert by `reference.layer`. The routing weight is not applied here but in the combine, on the token's own
rank.
"""

from __future__ import annotations

from torch import Tensor

from .numerics import compute_dtype, operand, rows_dtype, tree_sum


def down(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """o = round(a weight' + bias): a [n, I], weight [H, I], bias [H] -> [n, H] in the dtype of per-route rows."""
    compute = compute_dtype(a.dtype)
    o = operand(a, compute) @ operand(weight, compute).t()
    if bias is not None:
        o = o + bias.to(compute)
    return o.to(rows_dtype(a.dtype))


def down_dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """da = dy weight, not yet scaled by the routing weight: dy [n, H], weight [H, I] -> [n, I], unrounded."""
    compute = compute_dtype(dy.dtype)
    return operand(dy, compute) @ operand(weight, compute)


def down_wgrad(dy: Tensor, scaled_a: Tensor) -> Tensor:
    """dy' (s a): dy [n, H], scaled_a = round(s * a) [n, I] -> [H, I], unrounded, in the compute dtype."""
    compute = compute_dtype(dy.dtype)
    return operand(dy, compute).t() @ operand(scaled_a, compute)


def route_weight_grad(da: Tensor, a: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """<dy, o> for each row, as <da, a> + <dy, bias>, summed in a fixed tree; never by dividing by the weight.

    Args:
        da: unscaled gradient of a, [n, I], compute dtype.
        a: the rounded activation, [n, I].
        dy: [n, H].
        bias: of the down GEMM, [H], or None.

    Returns:
        [n] in the compute dtype.
    """
    compute = da.dtype
    grad = tree_sum(da * a.to(compute))
    if bias is not None:
        grad = grad + tree_sum(dy.to(compute) * bias.to(compute))
    return grad
