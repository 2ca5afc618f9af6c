"""What the benchmark asks of an implementation of the layer, ours or a peer's: one class each, one file each.

An implementation says why it cannot run here, or is bound to a problem and then is a function of the leaves. Everything
else - modes, numbers, times, memory - is done to all of them by the same code.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch import Tensor

from .faults import one_line
from .problem import Problem

Call = Callable[[], Any]


class PreparedCall:
    """A call that needs something before each time that is not part of it."""

    def __init__(self, before: Call, call: Callable[[Any], Any]) -> None:
        self._before, self._call = before, call
        self._ready: list[Any] = []

    def prepare(self) -> None:
        self._ready = [self._before()]

    def __call__(self) -> Any:
        return self._call(self._ready.pop())


def prepare(call: Call) -> None:
    """Before each time of a call."""
    if isinstance(call, PreparedCall):
        call.prepare()


def prepared(call: Call) -> Any:
    """What the call returns, with what it needs before."""
    prepare(call)
    return call()


def same(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of leaves that have the problem's layout."""
    return gradients


@dataclass(frozen=True)
class Bound:
    """An implementation with a problem's tensors.

    function: of `leaves`, returns y [T, H], differentiable.
    leaves: x, topk_weights, w_gate_up, w_down, in whatever layout the implementation takes them; no copies where a view
        will do.
    layout: gradients of `leaves` in the problem's layout.
    repeats: whether backward leaves what forward saved as it was, and may run again.
    """

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    layout: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = same
    repeats: bool = True


@dataclass(frozen=True)
class Yardstick:
    """Work of the same size as the layer's, without its result; there is nothing to check."""

    forward: Call
    backward: Call


class Implementation(ABC):
    """One way to compute the layer."""

    #: In options, tables and CSV files.
    name: str
    #: Other forms of the same, of which the fastest on a problem is shown; empty: there is one.
    variants: tuple[str, ...] = ()
    #: Whether it may run under torch.compile (fullgraph) and in a CUDA graph.
    compiles: bool = True
    captures: bool = True
    #: Packages that it needs, as (module, distribution).
    packages: tuple[tuple[str, str], ...] = ()

    def absent(self, problem: Problem) -> str:
        """Why it does not run here, or an empty string. Does not touch the device."""
        for module, distribution in self.packages:
            try:
                importlib.import_module(module)
            except Exception as error:
                return f"needs the package {distribution}: {one_line(error)}"
        return self.unfit(problem)

    def unfit(self, problem: Problem) -> str:
        """The same, once its packages are there."""
        return ""

    def version(self) -> str:
        """Of the packages, for the CSV file."""
        found = []
        for _, distribution in self.packages:
            try:
                found.append(f"{distribution} {metadata.version(distribution)}")
            except metadata.PackageNotFoundError:
                found.append(distribution)
        return " ".join(found)

    @abstractmethod
    def bind(self, problem: Problem, variant: str = "") -> Bound | Yardstick:
        """Ready to run. What can be done once for many steps of training is done here."""

    def check(self) -> None:
        """After calls: raises what they have left pending on the device."""
        return None


def one_rank(problem: Problem) -> str:
    """Why an implementation for one GPU does not fit, or an empty string."""
    return "" if problem.ranks == 1 else "has no ranks"


def whole_routes(problem: Problem) -> str:
    """Why one that needs K experts for every token does not fit, or an empty string."""
    return "" if problem.routes == problem.topk_idx.numel() else "needs routes without -1"
