"""SonicMoE (`pip install sonic-moe --no-deps` and what it imports): CuTe-DSL kernels for one Hopper or Blackwell GPU.

Its public layer computes the routing itself, so the routing of the problem goes to the two functions behind it, on its
path for a fixed number of experts per token. It compiles and tunes its kernels on the first calls of a shape, which
takes minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..implementation import Bound, Implementation, one_rank, whole_routes
from ..problem import Problem


class SonicMoE(Implementation):
    """Weights are views: [2I, H, E] and [H, I, E], gate before up."""

    name = "sonic"
    packages = (("sonicmoe", "sonic-moe"), ("quack", "quack-kernels"))
    compiles = False  # it asserts that it is not being compiled

    def unfit(self, problem: Problem) -> str:
        if problem.device.type != "cuda":
            return "needs a CUDA device"
        if torch.cuda.get_device_capability(problem.device)[0] < 9:
            return "needs a Hopper or Blackwell GPU"
        return one_rank(problem) or whole_routes(problem)

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

        topk_idx, experts = problem.topk_idx, problem.shape.num_experts
        tokens, top_k = topk_idx.shape
        routes = tokens * top_k

        def integers(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=topk_idx.device)

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            counts, offsets = integers(experts), integers(experts + 1)
            gather, scatter, back = (integers(routes) for _ in range(3))
            TC_topk_router_metadata_triton(topk_idx, experts, counts, offsets, gather, scatter, back)
            a, h = _UpProjection.apply(
                x,
                w_gate_up,
                None,
                offsets,
                routes,
                top_k,
                gather,
                scatter,
                back,
                None,
                False,
                ActivationType.SWIGLU,
                False,
                True,
            )
            return _DownProjection.apply(
                a,
                h,
                w_down,
                None,
                topk_weights,
                offsets,
                tokens,
                top_k,
                gather,
                scatter,
                back,
                None,
                False,
                ActivationType.SWIGLU,
            )

        x, topk_weights, w_gate_up, w_down = problem.leaves
        # Leaves of their own on the same memory.
        moved = [w.detach().permute(1, 2, 0).requires_grad_() for w in (w_gate_up, w_down)]
        return Bound(function, (x, topk_weights, *moved), _experts_first)


def _experts_first(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dx, d_weights, d_gate_up, d_down = gradients
    return dx, d_weights.view(dx.shape[0], -1), d_gate_up.permute(2, 0, 1), d_down.permute(2, 0, 1)
