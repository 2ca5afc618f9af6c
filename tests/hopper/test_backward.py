"""What the backward hands to the kernels and returns, with a stand-in for the launch on the CPU."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from tests.hopper.stand_in import Calls, note_launches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_megakernel import inner_ops
from moe_megakernel.hopper import backward, forward
from moe_megakernel.plan_names import Counter
from moe_megakernel.schemas import Options, Saved

EXPERTS, HIDDEN, WIDTH, TOP_K = 3, 16, 8, 2
GRADS = ("dx", "dtopk_weights", "dw_gate_up", "dw_down", "dbias_gate_up", "dbias_down")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return note_launches(monkeypatch, backward)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def make_saved(tokens: int = 5, activation: str = "swiglu", recompute: bool = False) -> Saved:
    columns = WIDTH if activation == "relu2" else 2 * WIDTH
    return Saved(
        dy=bf16(tokens, HIDDEN),
        x=bf16(tokens, HIDDEN),
        topk_idx=torch.randint(0, EXPERTS, (tokens, TOP_K)),
        topk_weights=torch.rand(tokens, TOP_K),
        w_gate_up=bf16(EXPERTS, columns, HIDDEN),
        w_down=bf16(EXPERTS, HIDDEN, WIDTH),
        bias_gate_up=bf16(EXPERTS, columns),
        bias_down=None,
        h=bf16(0 if recompute else tokens * TOP_K, columns),
        anchor=bf16(0),
        expert_offsets=torch.zeros(EXPERTS + 1, dtype=torch.int32),
    )


def row_route(tokens: int = 5) -> Tensor:
    return torch.zeros(tokens * TOP_K, dtype=torch.int32)


def make_call(saved: Saved, needs: int = 63, backend: str = "mega", activation: str = "swiglu") -> tuple[Any, ...]:
    recompute = saved.h.shape[0] == 0 and saved.dy.shape[0] > 0
    options = Options(activation, 1.0, math.inf, backend, needs, recompute)
    return (*saved, row_route(saved.dy.shape[0]), *options)


@pytest.mark.parametrize(("tokens", "activation"), [(0, "swiglu"), (1, "relu2"), (5, "swiglu")])
def test_results_look_as_the_fake_says(launches: Calls, tokens: int, activation: str) -> None:
    """For every set of wanted gradients; nothing is launched for none, nor without tokens."""
    for needs in range(64):
        call = make_call(make_saved(tokens, activation), needs, activation=activation)
        results = inner_ops._layer_backward(*call)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = torch.ops.moe.layer_backward(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in call))
        assert [(r.shape, r.dtype, r.stride()) for r in results] == [(f.shape, f.dtype, f.stride()) for f in fakes]
        if tokens == 0:
            assert not any(r.any() for r in results)
            assert not launches
        elif needs:
            given = launches.pop()
            wanted = [name for name in GRADS if given[name] is not None]
            assert wanted == [name for i, name in enumerate(GRADS) if needs >> i & 1]
            for name, result in zip(GRADS, results, strict=True):
                assert given[name] is None or given[name] is result, name
        assert not launches


@pytest.mark.parametrize("recompute", [False, True])
def test_the_launch_gets_what_it_needs(launches: Calls, recompute: bool) -> None:
    saved = make_saved(recompute=recompute)
    inner_ops._layer_backward(*make_call(saved, backend="staged"))
    (given,) = launches
    names = [name for name in Saved._fields if name not in ("anchor", *(["h"] if recompute else []))]
    for name in names:
        assert given[name] is getattr(saved, name), name
    assert (given["h"] is None) == recompute
    assert given["workspace"].numel() == 1005
    assert given["log"] is None
    options = ("width", "activation", "alpha", "limit", "staged", "num_sms", "timeout_ns", "skip_counter", "skip_index")
    assert [given[name] for name in options] == [WIDTH, 0, 1.0, math.inf, True, 132, 2_500_000_000, -1, 0]


def accumulate_call(saved: Saved, main: tuple[Tensor, Tensor], needs: int = 63) -> tuple[Any, ...]:
    return (*saved, row_route(saved.dy.shape[0]), *main, *Options("swiglu", 1.0, math.inf, "mega", needs, False))


@pytest.mark.parametrize("given", list(product((False, True), repeat=2)), ids=str)
def test_main_gradients_stand_in_for_gradients(launches: Calls, given: tuple[bool, bool]) -> None:
    """An empty one means none; what is added to one is not returned, and counts as a change of it."""
    shapes = ((EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    gate_up, down = (torch.zeros(shape) if on else bf16(0) for shape, on in zip(shapes, given, strict=True))
    results = inner_ops._layer_backward_accumulate(*accumulate_call(make_saved(), (gate_up, down)))
    assert len(launches) == 1
    for i, (name, main, on) in enumerate(zip(GRADS[2:4], (gate_up, down), given, strict=True)):
        assert launches[0][name] is (main if on else results[2 + i])
        assert results[2 + i].numel() == (0 if on else math.prod(shapes[i]))
        assert main._version == int(on)


def test_a_main_gradient_that_does_not_fit_is_copied_there_and_back(
    launches: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = backward._launch
    names = [argument.name for argument in torch.ops.moe.hopper_backward.default._schema.arguments]

    def add_one(*args: Any) -> None:
        note(*args)
        for name in ("dw_gate_up", "dw_down"):
            args[names.index(name)].add_(1)

    monkeypatch.setattr(backward, "_launch", add_one)
    gate_up = torch.full((HIDDEN, 2 * WIDTH, EXPERTS), 3.0).permute(2, 1, 0)
    down = torch.full((1 + EXPERTS * HIDDEN * WIDTH,), 3.0)[1:].view(EXPERTS, HIDDEN, WIDTH)
    inner_ops._layer_backward_accumulate(*accumulate_call(make_saved(), (gate_up, down)))
    for name, main in (("dw_gate_up", gate_up), ("dw_down", down)):
        assert launches[0][name].is_contiguous()
        assert launches[0][name].data_ptr() % 16 == 0
        assert bool((main == 4).all()), name


def test_main_gradients_are_left_alone_without_tokens_or_need(launches: Calls) -> None:
    main = torch.ones(EXPERTS, 2 * WIDTH, HIDDEN), torch.ones(EXPERTS, HIDDEN, WIDTH)
    inner_ops._layer_backward_accumulate(*accumulate_call(make_saved(0), main))
    assert not launches
    inner_ops._layer_backward_accumulate(*accumulate_call(make_saved(), main, needs=0b0011))
    assert launches[0]["dw_gate_up"] is launches[0]["dw_down"] is None
    for tensor in main:
        assert bool((tensor == 1).all())
        assert tensor._version == 0


def test_tensors_that_do_not_fit_are_copied(launches: Calls) -> None:
    saved = make_saved()._replace(
        dy=torch.ones((), dtype=torch.bfloat16).expand(5, HIDDEN),
        x=bf16(HIDDEN, 5).t(),
        w_down=bf16(EXPERTS, WIDTH, HIDDEN).transpose(1, 2),
        bias_gate_up=bf16(2 * WIDTH, EXPERTS).t(),
    )
    inner_ops._layer_backward(*make_call(saved))
    for name in ("dy", "x", "w_down", "bias_gate_up"):
        assert launches[0][name].is_contiguous(), name
        assert torch.equal(launches[0][name], getattr(saved, name)), name


def test_inputs_that_were_not_saved_stay_none(launches: Calls) -> None:
    saved = make_saved()._replace(x=None, w_gate_up=None, w_down=None, bias_gate_up=None)
    inner_ops._layer_backward(*make_call(saved, needs=0b001000))
    for name in ("x", "w_gate_up", "w_down", "bias_gate_up", "bias_down"):
        assert launches[0][name] is None, name


def test_a_workspace_that_a_timeout_left_is_dropped_first(launches: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the error waits for the next forward: nothing is raised in the middle of a backward."""
    order: list[str] = []
    workspace = backward.get_workspace
    monkeypatch.setattr(backward, "poll", lambda device: order.append("poll"))
    monkeypatch.setattr(backward, "get_workspace", lambda *a: (order.append("workspace"), workspace(*a))[1])
    inner_ops._layer_backward(*make_call(make_saved()))
    assert order == ["poll", "workspace"]


def test_hooks_of_backward_tests_reach_the_launch(launches: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_megakernel.hopper import testing
    from moe_megakernel.plan_names import Direction

    monkeypatch.setattr(testing, "most_records", lambda sizes, direction, peer: sizes.tokens + 100 * direction)
    call = make_call(make_saved(tokens=7))
    with testing.fault(Counter.DH_READY, 2, Direction.BACKWARD), testing.logged(Direction.BACKWARD) as logs:
        inner_ops._layer_backward(*call)
    inner_ops._layer_backward(*call)
    assert launches[0]["log"] is logs[0]
    assert len(logs[0]) == 1 + 5 * 107
    assert [launches[0][name] for name in ("skip_counter", "skip_index")] == [Counter.DH_READY, 2]
    assert [launches[1][name] for name in ("log", "skip_counter", "skip_index")] == [None, -1, 0]


def test_a_step_through_autograd(launches: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's backend reaches the backward, with the caller's ids and what the forward has returned."""
    forwards = note_launches(monkeypatch, forward)
    saved = make_saved()
    leaves = [t.requires_grad_() for t in (saved.x, saved.topk_weights, saved.w_gate_up, saved.w_down) if t is not None]
    x, topk_weights, w_gate_up, w_down = leaves
    options = Options("swiglu", 1.0, math.inf, "staged", 0b001111, False)
    tensors = (x, saved.topk_idx, topk_weights, w_gate_up, w_down, None, None, None, None)
    y, h, *_ = torch.ops.moe.layer_forward(*tensors, EXPERTS, *options)
    y.backward(saved.dy)
    (first,), (second,) = forwards, launches
    assert first["staged"] is second["staged"] is True
    assert second["topk_idx"].data_ptr() == saved.topk_idx.data_ptr()
    for name in ("h", "expert_offsets", "row_route"):
        assert second[name].data_ptr() == first[name].data_ptr(), name
    assert second["h"].shape == h.shape
    for leaf, name in zip(leaves, GRADS, strict=False):
        assert leaf.grad is not None
        assert leaf.grad.shape == second[name].shape
