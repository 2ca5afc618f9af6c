"""cuBLAS with as many operations and nothing else: the roofline that a layer is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from ..implementation import Implementation, Yardstick
from ..problem import Problem


class Dense(Implementation):
    """All rows through one expert's weights: two products forward, four backward; no routing, activation or combine."""

    name = "dense"

    def bind(self, problem: Problem, variant: str = "") -> Yardstick:
        rows, (hidden, width) = problem.routes, (problem.shape.hidden, problem.shape.width)
        w_gate_up, w_down = problem.w_gate_up.detach()[0], problem.w_down.detach()[0]

        def normal(columns: int) -> Tensor:
            return torch.randn(rows, columns, device=problem.device, dtype=problem.x.dtype)

        x_rows, dy_rows, a_rows, dh_rows = normal(hidden), normal(hidden), normal(width), normal(2 * width)

        def forward() -> Tensor:
            torch.mm(x_rows, w_gate_up.t())
            return torch.mm(a_rows, w_down.t())

        def backward() -> Tensor:
            torch.mm(dy_rows, w_down)
            torch.mm(dy_rows.t(), a_rows)
            torch.mm(dh_rows.t(), x_rows)
            return torch.mm(dh_rows, w_gate_up)

        return Yardstick(forward, backward)
