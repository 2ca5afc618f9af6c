"""Liger's fused MoE in Triton (`pip install liger-kernel`): `LigerFusedMoEFunction`. Reads one number back per call."""

from __future__ import annotations

from torch import Tensor

from ..implementation import Bound, Implementation, one_rank, whole_routes
from ..problem import Problem


class LigerTriton(Implementation):
    """Tunes itself on the first call of a shape; LIGER_FUSED_MOE_AUTOTUNE=0 in the environment cuts that short."""

    name = "liger"
    packages = (("liger_kernel.ops.fused_moe", "liger-kernel"),)
    compiles = captures = False  # it copies the number of tiles to the host

    def unfit(self, problem: Problem) -> str:
        if problem.device.type != "cuda":
            return "needs a CUDA device"
        return one_rank(problem) or whole_routes(problem)

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        topk_idx = problem.topk_idx

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            return LigerFusedMoEFunction.apply(x, w_gate_up, w_down, topk_idx, topk_weights)

        return Bound(function, problem.leaves)
