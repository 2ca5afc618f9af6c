"""ScatterMoE (github.com/shawntan/scattermoe): Triton kernels that gather and scatter inside the products."""

from __future__ import annotations

from torch import Tensor

from ..implementation import Bound, Implementation, one_rank, whole_routes
from ..problem import Problem
from .torch_staged import gated


class ScatterMoE(Implementation):
    """Weights as views [E, H, 2I] and [E, I, H]; routing weights rounded to bfloat16, as it multiplies them by rows."""

    name = "scattermoe"
    packages = (("scattermoe", "scattermoe"),)
    compiles = False  # parts of it are compiled by themselves
    captures = False

    def unfit(self, problem: Problem) -> str:
        if problem.device.type != "cuda":
            return "needs a CUDA device"
        return one_rank(problem) or whole_routes(problem)

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        from scattermoe.parallel_experts import flatten_sort_count, parallel_linear

        topk_idx, shape = problem.topk_idx, problem.shape

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            by_expert, routes, ends = flatten_sort_count(topk_idx, num_experts=shape.num_experts)
            h = parallel_linear(x, w_gate_up.mT, shape.top_k, by_expert, routes, ends, grouped_out=True)
            weights = topk_weights.to(x.dtype)
            return parallel_linear(gated(h), w_down.mT, 1, by_expert, routes, ends, gates=weights, grouped_in=True)

        return Bound(function, problem.leaves, repeats=False)  # backward overwrites the rows that forward has saved
