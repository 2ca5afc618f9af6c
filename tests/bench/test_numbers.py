"""What implementations compute, against float32, in all modes that a CPU has; what is counted of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moe_megakernel.bench import expected, modes
from moe_megakernel.bench.implementation import Bound, Yardstick
from moe_megakernel.bench.memory import measure_memory, saved_bytes
from moe_megakernel.bench.peers import IMPLEMENTATIONS
from moe_megakernel.bench.peers.exchange import local_experts
from moe_megakernel.bench.problem import LEAVES, Problem, make_problem
from moe_megakernel.bench.routings import Routing
from moe_megakernel.shapes import Shape

SMALL = Shape("small", "small", num_experts=8, hidden=64, width=32, top_k=4, tokens=100)


def small(kind: str = "zipf") -> Problem:
    return make_problem(SMALL, Routing(kind), device="cpu")


def bound(name: str, problem: Problem, variant: str = "") -> Bound:
    found = IMPLEMENTATIONS[name].bind(problem, variant)
    assert isinstance(found, Bound)
    return found


@pytest.mark.parametrize(("name", "variant"), [("reference", ""), ("torch_staged", "mul_sum"), ("torch_staged", "bmm")])
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one-hot"])
def test_implementations_are_right(name: str, variant: str, kind: str) -> None:
    problem = small(kind)
    assert IMPLEMENTATIONS[name].absent(problem) == ""
    found = modes.results(bound(name, problem, variant), problem.dy, "eager")
    errors = expected.check_numbers(expected.make_expected(problem), found)
    assert set(errors) == {"y", *LEAVES}
    assert 1e-4 < max(errors.values()) < 1e-2
    assert problem.x.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "torch_staged"])
def test_compiled_implementations_are_right(name: str) -> None:
    problem = small()
    check = expected.make_expected(problem)
    made = bound(name, problem)
    expected.check_numbers(check, modes.results(made, problem.dy, "compiled"))
    call = modes.make_call(made, problem, "backward", "compiled")
    for _ in range(2):
        gradients = dict(zip(LEAVES, call(), strict=True))
        expected.check_numbers(check, gradients)


def test_backward_alone_runs_again_and_again() -> None:
    problem = small()
    call = modes.make_call(bound("torch_staged", problem), problem, "backward", "eager")
    first, second = call(), call()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    both = modes.make_call(bound("torch_staged", problem), problem, "both", "eager")()
    assert all(torch.equal(a, b) for a, b in zip(first, both, strict=True))


def test_dropped_routes_count() -> None:
    problem = small()
    problem.topk_idx[::3, 1] = -1
    problem.topk_idx[5] = -1
    found = modes.results(bound("reference", problem), problem.dy, "eager")
    expected.check_numbers(expected.make_expected(problem), found)
    assert IMPLEMENTATIONS["torch_staged"].absent(problem) == "needs routes without -1"


def _last_token(t: Tensor) -> Tensor:
    t = t.clone()
    t[-1] *= 1.5
    return t


def _one_expert(t: Tensor) -> Tensor:
    t = t.clone()
    t[t.flatten(1).norm(dim=1).argmax()] *= 1.1
    return t


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("y", _last_token, "y: expected a relative error below 0.01, got"),
        ("x", lambda t: 1.1 * t, "gradient of x: expected a relative error below 0.02, got 1"),
        ("topk_weights", lambda t: t.flip(1), "gradient of topk_weights: expected"),
        ("w_gate_up", _one_expert, "gradient of w_gate_up: expected"),
        ("w_down", lambda t: t * float("nan"), "gradient of w_down: expected a relative error below 0.02, got nan"),
    ],
)
def test_wrong_numbers_are_found(name: str, spoil: Callable[[Tensor], Tensor], message: str) -> None:
    problem = small()
    found = modes.results(bound("reference", problem), problem.dy, "eager")
    with pytest.raises(ValueError, match=message):
        expected.check_numbers(expected.make_expected(problem), {**found, name: spoil(found[name])})


def test_expected_is_the_formula() -> None:
    """All tokens and three experts, against a plain float64 layer."""
    problem = make_problem(SMALL, Routing("zipf"), 20, "cpu")
    found = expected.make_expected(problem)
    x, weights, w_gate_up, w_down = (t.detach().double().requires_grad_() for t in problem.leaves)
    y = torch.zeros_like(x)
    for token in range(20):
        for slot, expert in enumerate(problem.topk_idx[token].tolist()):
            gate, up = (w_gate_up[expert] @ x[token]).chunk(2)
            o = w_down[expert] @ (torch.nn.functional.silu(gate) * up)
            y = y.index_add(0, torch.tensor([token]), weights[token, slot] * o[None])
    gradients = torch.autograd.grad(y, (x, weights, w_gate_up, w_down), problem.dy.double())
    for name, whole in zip(("y", *LEAVES), (y, *gradients), strict=True):
        torch.testing.assert_close(found.values[name], found.part(name, whole), rtol=1e-4, atol=1e-4)
    assert len(found.tokens) == 20
    assert len(found.experts) == 3


def test_dense_has_as_many_operations() -> None:
    problem = small()
    yardstick = IMPLEMENTATIONS["dense"].bind(problem)
    assert isinstance(yardstick, Yardstick)
    for direction in modes.DIRECTIONS:
        count = FlopCounterMode(display=False)
        with count:
            modes.make_call(yardstick, problem, direction, "eager")()
        assert count.get_total_flops() == SMALL.flops(100, direction)


def test_saved_bytes() -> None:
    """The layer keeps h, offsets and route numbers; staged PyTorch the rows of x, h, a and o, and more."""
    problem = small("uniform")
    rows, h, offsets = 400, 400 * 64 * 2, 9 * 4
    assert saved_bytes(bound("reference", problem), problem) == h + offsets + rows * 4
    x_rows = o_rows = rows * 64 * 2
    memory = measure_memory(bound("torch_staged", problem, "mul_sum"), problem)
    assert memory.saved >= x_rows + h + h // 2 + o_rows
    assert (memory.workspace, memory.peak) == (0, 0)


@pytest.mark.parametrize("name", ["reference", "torch_staged"])
def test_counting_saved_bytes_keeps_nothing(name: str) -> None:
    """Of a forward whose result is an output that some operation saves."""
    problem = small()
    original, seen = bound(name, problem), []

    def function(*leaves: Tensor) -> Tensor:
        y = original.function(*leaves).tanh()
        seen.append(weakref.ref(y))
        return y

    saved_bytes(replace(original, function=function), problem)
    gc.collect()
    assert [ref() for ref in seen] == [None]


def test_saved_bytes_of_intermediates_that_nobody_else_holds() -> None:
    """The memory of one that has gone could become the next one's."""
    problem = small()

    def function(x: Tensor, *_: Tensor) -> Tensor:
        for _step in range(6):
            x = x.sigmoid()
        return x

    chain = replace(bound("reference", problem), function=function)
    assert saved_bytes(chain, problem) == 6 * problem.x.untyped_storage().nbytes()


def test_local_experts_of_tokens_that_arrive_once() -> None:
    """The part of the layer between DeepEP's dispatch and combine, differentiated."""
    problem = small()
    idx = torch.where(problem.topk_idx >= 4, problem.topk_idx - 4, -1)
    weights = problem.topk_weights
    y = local_experts(problem.x, weights, idx, problem.w_gate_up[4:], problem.w_down[4:])
    dropped = make_problem(SMALL, Routing("zipf"), device="cpu")
    dropped.topk_idx[dropped.topk_idx < 4] = -1
    expected.check_numbers(expected.make_expected(dropped), {"y": y})
    dx, d_weights = torch.autograd.grad(y, (problem.x, weights), problem.dy)
    expected.check_numbers(expected.make_expected(dropped), {"x": dx, "topk_weights": d_weights})


@pytest.mark.parametrize("name", ["sonic", "liger", "scattermoe", "nccl", "deepep", "mega"])
def test_those_that_are_absent_say_why(name: str) -> None:
    reason = IMPLEMENTATIONS[name].absent(small())
    assert reason.startswith("needs ") or "CUDA" in reason, reason
