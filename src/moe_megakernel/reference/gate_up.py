"""gate_up: the first grouped GEMM of one expert, with bias; forward, dgrad and wgrad.

Called per expert by `reference.layer`, so that operand shapes and positions, and with them the bits, depend on the
expert's rows only. h is rounded to the storage dtype here; the activation that follows reads the rounded values.
"""

from __future__ import annotations

from torch import Tensor

from .numerics import compute_dtype, operand, rows_dtype


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """h = round(x weight' + bias): x [n, H], weight [2I, H], bias [2I] -> [n, 2I] in x's dtype."""
    compute = compute_dtype(x.dtype)
    h = operand(x, compute) @ operand(weight, compute).t()
    if bias is not None:
        h = h + bias.to(compute)
    return h.to(x.dtype)


def gate_up_dgrad(dh: Tensor, weight: Tensor) -> Tensor:
    """dx rows = round(dh weight): dh [n, 2I], weight [2I, H] -> [n, H] in the dtype of per-route rows."""
    compute = compute_dtype(dh.dtype)
    return (operand(dh, compute) @ operand(weight, compute)).to(rows_dtype(dh.dtype))


def gate_up_wgrad(dh: Tensor, x: Tensor) -> Tensor:
    """dh' x: dh [n, 2I], x [n, H] -> [2I, H], unrounded, in the compute dtype."""
    compute = compute_dtype(x.dtype)
    return operand(dh, compute).t() @ operand(x, compute)
