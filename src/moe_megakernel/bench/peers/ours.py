"""This library's layer, by one of its backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...backends import available_backends
from ...errors import check_errors
from ..implementation import Bound, Implementation
from ..problem import Problem


class Ours(Implementation):
    """`torch.ops.moe.dispatch_gemm_combine` on one rank."""

    def __init__(self, backend: str) -> None:
        self.name = backend
        self.captures = backend != "reference"  # which reads the expert counts back

    def unfit(self, problem: Problem) -> str:
        device = problem.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return available_backends(device.type, capability).get(self.name) or ""

    def version(self) -> str:
        from ... import __version__

        return f"moe-megakernel {__version__}"

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        options: dict[str, Any] = {}
        if problem.group is not None:
            options = {"group_name": problem.group.group_name, "row_capacity": problem.most_rows}
        return Bound(layer_of(problem.topk_idx, problem.shape.num_experts, self.name, **options), problem.leaves)

    def check(self) -> None:
        check_errors()


def layer_of(topk_idx: Tensor, num_experts: int, backend: str, **options: Any) -> Callable[..., Tensor]:
    """The layer as a function of the leaves."""

    def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        return torch.ops.moe.dispatch_gemm_combine(
            x, topk_idx, topk_weights, w_gate_up, w_down, num_experts=num_experts, backend=backend, **options
        )

    return function
