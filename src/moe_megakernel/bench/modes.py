"""How a bound implementation is run: eager, compiled or as a CUDA graph; forward, backward, or both in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
from torch import Tensor

from .implementation import Bound, Call, Implementation, PreparedCall, Yardstick
from .problem import LEAVES, Problem

DIRECTIONS = ("forward", "backward", "both")
MODES = ("eager", "compiled", "graph")


def mode_fault(implementation: Implementation, mode: str, device: torch.device) -> str:
    """Why an implementation does not run in a mode, or an empty string."""
    if mode == "graph" and device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if mode == "graph" and not implementation.captures:
        return "waits for the device inside, so no CUDA graph can hold it"
    if mode == "compiled" and not implementation.compiles:
        return "does not run under torch.compile(fullgraph=True)"
    return ""


def results(bound: Bound, dy: Tensor, mode: str) -> dict[str, Tensor]:
    """y and the gradients of the leaves in the problem's layout, of one step in that mode."""
    if mode == "graph":
        graph, _, kept = _capture(bound, lambda here: _step(here, dy, mode))
        graph.replay()
        found = tuple(t.clone() for t in kept)
    else:
        found = _step(bound, dy, mode)()
    return dict(zip(("y", *LEAVES), (found[0], *bound.layout(found[1:])), strict=True))


def _step(bound: Bound, dy: Tensor, mode: str) -> Callable[[], tuple[Tensor, ...]]:
    """y and the gradients of the leaves."""
    function, leaves = _function(bound, mode), bound.leaves

    def step() -> tuple[Tensor, ...]:
        y = function(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return step


def make_call(bound: Bound | Yardstick, problem: Problem, direction: str, mode: str) -> Call:
    """A call without arguments that does one step, or one direction of it.

    Backward alone is `torch.autograd.grad` of a forward that has run, whose graph is kept from call to call; where that
    does not work, a forward belongs before each call (`implementation.prepare`).
    """
    if mode == "graph":
        return _captured(bound, problem, direction)
    return _plain(bound, problem, direction, mode)


def _plain(bound: Bound | Yardstick, problem: Problem, direction: str, mode: str) -> Call:
    if isinstance(bound, Yardstick):
        return {"forward": bound.forward, "backward": bound.backward, "both": _both(bound)}[direction]
    return _call(bound, problem.dy, direction, mode)


def _call(bound: Bound, dy: Tensor, direction: str, mode: str) -> Call:
    function, leaves = _function(bound, mode), bound.leaves
    if direction == "forward":
        return lambda: function(*leaves)
    if direction == "both":
        return lambda: torch.autograd.grad(function(*leaves), leaves, dy)
    if not bound.repeats:
        return PreparedCall(lambda: function(*leaves), lambda y: torch.autograd.grad(y, leaves, dy))
    y = function(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def _both(yardstick: Yardstick) -> Call:
    def call() -> Any:
        yardstick.forward()
        return yardstick.backward()

    return call


def _function(bound: Bound, mode: str) -> Any:
    if mode != "compiled":
        return bound.function
    # For the rest of the process: a compiled backward must not reuse what its forward saved, since it runs more than
    # once, and asks for this when it runs.
    functorch.donated_buffer = False
    return torch.compile(bound.function, fullgraph=True, dynamic=False)


def _captured(bound: Bound | Yardstick, problem: Problem, direction: str) -> Call:
    """Replays of a call as one CUDA graph. What it returns lives in the graph's memory and is not given out.

    The call is kept, because what its forward has saved lies outside of that memory and is read by every replay.
    """
    kept = _capture(bound, lambda here: _plain(here, problem, direction, "eager"))

    def replay() -> None:
        kept.graph.replay()

    return replay


def _on_this_stream(bound: Bound | Yardstick) -> Any:
    """The same with leaves of its own on the same memory: a backward also waits for the stream on which a leaf was used
    first, if what used it there is still alive, and a capture must not wait for a stream outside of it.
    """
    if isinstance(bound, Yardstick):
        return bound
    return replace(bound, leaves=tuple(t.detach().requires_grad_(t.requires_grad) for t in bound.leaves))


class _Captured(NamedTuple):
    """results: what the call has returned in the graph."""

    graph: torch.cuda.CUDAGraph
    call: Call
    results: Any


def _capture(bound: Bound | Yardstick, make: Callable[[Any], Call]) -> _Captured:
    """A graph of the call that `make` gives for the implementation, with leaves of the capture's stream.

    All of it happens on the stream of the capture, what `make` runs before as well: autograd runs a backward where its
    forward ran.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = make(_on_this_stream(bound))
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return _Captured(graph, call, results)
