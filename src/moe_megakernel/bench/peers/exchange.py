"""The usual expert parallelism: rows travel by a library, then grouped_mm works on what has arrived, then rows go home.

Two libraries: NCCL's all-to-all through torch.distributed (gloo on CPUs), which sends every route's row and asks the
host for the sizes, as torchtitan and Megatron do; and DeepEP, which sends a token once to a rank and adds up there what
it sends back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..implementation import Bound, Implementation, whole_routes
from ..problem import Problem
from .torch_staged import COMBINES, Gather, Permute, gated, grouped_mm, inverse, sort_routes


class Splits(NamedTuple):
    """Rows that go to, and come from, each rank."""

    sent: list[int]
    received: list[int]

    def back(self) -> Splits:
        return Splits(self.received, self.sent)


class AllToAll(torch.autograd.Function):
    """Rows [sum(sent), H] to their ranks, in rank order -> [sum(received), H]. Backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = splits, group
        return _exchange(rows, splits, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = grads
        return _exchange(rows, ctx.splits.back(), ctx.group), None, None


def _exchange(rows: Tensor, splits: Splits, group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(splits.received), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), splits.received, splits.sent, group=group)
    return received


class Arrivals(NamedTuple):
    """order: of arrived rows by expert; place: the inverse; ends: int32 [L] of the rank's experts; splits."""

    order: Tensor
    place: Tensor
    ends: Tensor
    splits: Splits


@torch.no_grad()
def exchange_counts(ends: Tensor, problem: Problem, group: dist.ProcessGroup) -> Arrivals:
    """Tells all ranks how many rows go to every expert, and works out what arrives. Waits for the device."""
    ranks = group.size()
    counts = ends.diff(prepend=ends.new_zeros(1))
    all_counts = counts.new_empty(ranks, len(counts))
    dist.all_gather(list(all_counts), counts, group=group)
    owned = problem.experts_of(group.rank())
    arriving = all_counts[:, owned.start : owned.stop]  # [W, L]: rows from each rank for each expert
    on_host = all_counts.tolist()
    sent = [sum(on_host[group.rank()][e] for e in problem.experts_of(rank)) for rank in range(ranks)]
    received = [sum(on_host[rank][e] for e in owned) for rank in range(ranks)]
    # Rows arrive by rank, then by expert; a stable sort by expert keeps ranks in order.
    expert_of = torch.arange(len(owned), device=counts.device).repeat(ranks)
    experts = torch.repeat_interleave(expert_of, arriving.flatten().long(), output_size=sum(received))
    order = experts.sort(stable=True).indices
    return Arrivals(order, inverse(order), arriving.sum(0).cumsum(0).int(), Splits(sent, received))


class NcclExchange(Implementation):
    """All-to-all of every route's row, grouped_mm, all-to-all back, weighted sum at home."""

    name = "nccl"
    variants = tuple(COMBINES)
    compiles = captures = False  # the host waits for the sizes

    def unfit(self, problem: Problem) -> str:
        if problem.group is None:
            return "needs a process group: run under torchrun"
        return whole_routes(problem)

    def version(self) -> str:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
        return f"torch {torch.__version__} nccl {nccl}"

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        combine, shape, group = COMBINES[variant or "mul_sum"], problem.shape, problem.group
        assert group is not None
        topk_idx = problem.topk_idx

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            order, place, ends = sort_routes(topk_idx, shape.num_experts)
            there = exchange_counts(ends, problem, group)
            rows = AllToAll.apply(Gather.apply(x, order, place, shape.top_k), there.splits, group)
            x_rows = Permute.apply(rows, there.order, there.place)
            o_rows = grouped_mm(gated(grouped_mm(x_rows, w_gate_up, there.ends)), w_down, there.ends)
            home = AllToAll.apply(Permute.apply(o_rows, there.place, there.order), there.splits.back(), group)
            return combine(Permute.apply(home, place, order).unflatten(0, (-1, shape.top_k)), topk_weights)

        return Bound(function, problem.leaves)


# -- DeepEP ------------------------------------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts; backward is a combine of the same handle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, topk_idx: Tensor, buffer: Any, options: dict[str, Any]) -> Any:
        rows, idx, row_weights, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, async_with_compute_stream=True, **options
        )
        event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.num_sms = buffer, handle, options["num_sms"]
        ctx.mark_non_differentiable(idx)
        ctx.set_materialize_grads(True)
        return rows, row_weights, idx, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        d_rows, d_weights, _, _ = grads
        dx, d_home, event = ctx.buffer.combine(
            d_rows, handle=ctx.handle, topk_weights=d_weights, num_sms=ctx.num_sms, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return dx, d_home, None, None, None


class _Combine(torch.autograd.Function):
    """Sums of rows of the same token, at home; backward is a dispatch by the same handle."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any, num_sms: int) -> Tensor:
        y, _, event = buffer.combine(rows, handle=handle, num_sms=num_sms, async_with_compute_stream=True)
        event.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.num_sms = buffer, handle, num_sms
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, *_, event = ctx.buffer.dispatch(
            grads[0], handle=ctx.handle, num_sms=ctx.num_sms, async_with_compute_stream=True
        )
        event.current_stream_wait()
        return rows, None, None, None


def local_experts(rows: Tensor, weights: Tensor, idx: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The rank's own part of tokens [N, H] that have arrived once each: their rows of its experts, weighted and added.

    Args:
        weights, idx: [N, K] routing weights and local experts, -1 where another rank has the expert.
    """
    chosen = (idx >= 0).flatten().nonzero().flatten()
    by_expert = chosen[idx.flatten()[chosen].sort(stable=True).indices]
    experts = torch.arange(len(w_gate_up), device=idx.device)
    ends = torch.searchsorted(idx.flatten()[by_expert].long(), experts, right=True, out_int32=True)
    tokens = by_expert // idx.shape[1]
    o_rows = grouped_mm(gated(grouped_mm(rows.index_select(0, tokens), w_gate_up, ends)), w_down, ends)
    weighted = o_rows * weights.flatten()[by_expert, None].to(o_rows.dtype)
    return torch.zeros_like(rows).index_add(0, tokens, weighted)


class DeepEPExchange(Implementation):
    """DeepEP's elastic buffer (version 2), grouped_mm between its dispatch and combine."""

    name = "deepep"
    packages = (("deep_ep", "deep_ep"),)
    compiles = captures = False  # the host waits for the sizes

    def unfit(self, problem: Problem) -> str:
        import deep_ep

        if not hasattr(deep_ep, "ElasticBuffer"):
            return "needs deep_ep with ElasticBuffer (version 2)"
        if problem.device.type != "cuda" or problem.group is None:
            return "needs a process group over CUDA devices: run under torchrun"
        return ""

    def bind(self, problem: Problem, variant: str = "") -> Bound:
        from deep_ep import ElasticBuffer

        shape, group, topk_idx = problem.shape, problem.group, problem.topk_idx.long()
        sizes = {"num_max_tokens_per_rank": problem.most_tokens, "hidden": shape.hidden, "num_topk": shape.top_k}
        buffer = ElasticBuffer(group, **sizes)
        num_sms = buffer.get_theoretical_num_sms(shape.num_experts, shape.top_k)
        options = {
            "num_experts": shape.num_experts,
            "num_max_tokens_per_rank": problem.most_tokens,
            "num_sms": num_sms,
        }

        def function(x: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
            rows, weights, idx, handle = _Dispatch.apply(x, topk_weights, topk_idx, buffer, options)
            return _Combine.apply(local_experts(rows, weights, idx, w_gate_up, w_down), buffer, handle, num_sms)

        return Bound(function, problem.leaves)
