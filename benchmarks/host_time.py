"""What an eager call costs the host: the layer's call, and the same call of a twin op that does nothing.

Run it by `python -m benchmarks.host_time`.

The twin has the schema, the autograd registration and the outer op (`dispatch_gemm_combine`) of the layer; only its
implementation is another one, which returns empty tensors. So the difference is what the library does between its op
and the return of the launch; what the twin costs is PyTorch's dispatch and autograd, and the outer op's checks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_megakernel import autograd, fake, schemas
from moe_megakernel.bench.implementation import Call
from moe_megakernel.bench.peers.ours import layer_of
from moe_megakernel.bench.problem import Problem, make_problem
from moe_megakernel.bench.routings import Routing
from moe_megakernel.shapes import find_shape

#: Calls between two waits for the device, so that the queue of launches never fills up.
CALLS_PER_WAIT = 20


class HostTime(NamedTuple):
    """Medians in microseconds of one eager training forward. `op`: the twin alone, without the outer op."""

    call: float
    twin: float
    op: float


_twin = torch.library.Library("moe_twin", "DEF")
_seen: list[tuple[Any, ...]] = []


def _empty_results(*args: Any) -> tuple[Tensor, ...]:
    _seen[:] = [args]
    return fake._forward(*args)


(_schema,) = (schema for schema in schemas.SCHEMAS if schema.startswith("layer_forward("))
_twin.define(_schema)
for _key in ("CPU", "CUDA"):
    _twin.impl("layer_forward", _empty_results, _key)
torch.library.register_autograd(
    "moe_twin::layer_forward", autograd._backward, setup_context=autograd._setup_context, lib=_twin
)


@contextmanager
def _twin_inside() -> Iterator[None]:
    """The outer op calls the twin where it calls the layer's op."""
    names = ("layer_forward", "layer_forward_direct")
    real = {name: getattr(torch.ops.moe, name) for name in names}
    for name in names:
        setattr(torch.ops.moe, name, torch.ops.moe_twin.layer_forward)
    try:
        yield
    finally:
        for name, op in real.items():
            setattr(torch.ops.moe, name, op)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _microseconds(call: Call, calls: int) -> float:
    """Median; frees the result, and with it the graph, outside of the time."""
    spent = []
    for number in range(calls):
        if number % CALLS_PER_WAIT == 0:
            _synchronize()
        begin = perf_counter_ns()
        y = call()
        spent.append((perf_counter_ns() - begin) / 1e3)
        del y
    _synchronize()
    return median(spent)


def measure(problem: Problem, backend: str = "mega", calls: int = 1000) -> HostTime:
    """Times `calls` calls of each.

    Raises:
        RuntimeError: the outer op does not look the layer's op up when it is called, so that no twin can stand in.
    """

    function = layer_of(problem.topk_idx, problem.shape.num_experts, backend)
    x, topk_weights, w_gate_up, w_down = problem.x.detach(), problem.topk_weights.detach(), *problem.leaves[2:]

    def call() -> Tensor:
        return function(x, topk_weights, w_gate_up, w_down)

    def run(function: Call) -> float:
        _microseconds(function, CALLS_PER_WAIT)
        return _microseconds(function, calls)

    gc.disable()
    try:
        real = run(call)
        _seen.clear()
        with _twin_inside():
            twin = run(call)
        if not _seen:
            raise RuntimeError("host_time: expected dispatch_gemm_combine to call torch.ops.moe.layer_forward by name")
        args = _seen[0]
        tensors = iter((x, problem.topk_idx, topk_weights, w_gate_up, w_down))
        # What an implementation sees has lost its graph; the op alone is called with the parameters themselves.
        given = [next(tensors) if isinstance(arg, Tensor) else arg for arg in args]
        op = run(lambda: torch.ops.moe_twin.layer_forward(*given)[0])
    finally:
        _seen.clear()  # it holds the layer's tensors
        gc.enable()
    return HostTime(real, twin, op)


def text(time: HostTime) -> str:
    return (
        f"host time of an eager training forward: {time.call:.1f} us; of the twin through the same outer op "
        f"{time.twin:.1f} us, of the twin op alone {time.op:.1f} us; the library adds {time.call - time.twin:.1f} us"
    )


if __name__ == "__main__":
    print(text(measure(make_problem(find_shape("bench-a"), Routing("uniform")))))
