"""Case A18: the fake of every op, forward and backward, against its real kernel, by opcheck and by comparison.

`PROBES` are inputs of every awkward kind; each op meets all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.steps import name_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_megakernel.testing import LayerInputs, make_inputs, random_routing

E, K = 4, 2


@dataclass(frozen=True)
class Probe:
    """Inputs of one opcheck."""

    name: str
    inputs: LayerInputs
    options: dict[str, Any]


def probes() -> list[Probe]:
    cases = []
    for hidden, width in ((2880, 3), (72, 20)):
        for i, index in enumerate((torch.int32, torch.int64)):
            ids = random_routing(5 + i, E, K, drop=0.3).to(index)
            inputs = make_inputs(ids, hidden, width, bias=bool(i), dtype=torch.float32)
            cases.append(Probe(f"H {hidden} {name_of(index)}", inputs, {"recompute": bool(i)}))
    small = make_inputs(random_routing(6, E, K, drop=0.3), 10, 6, bias=True, dtype=torch.bfloat16)
    wide = torch.empty(6, 21, dtype=torch.bfloat16).fill_(torch.nan)
    wide[:, 1::2] = small.x
    cases.append(Probe("sliced x", replace(small, x=wide[:, 1::2]), {}))
    cases.append(Probe("transposed x", replace(small, x=small.x.t().contiguous().t()), {}))
    empty = make_inputs(random_routing(0, E, K), 10, 6, bias=True, dtype=torch.float32)
    cases.append(Probe("no tokens", empty, {}))
    cases.append(Probe("all dropped", replace(small, topk_idx=torch.full((6, K), -1)), {"recompute": True}))
    relu = make_inputs(random_routing(6, E, K), 10, 6, activation="relu2", bias=True, dtype=torch.float16)
    cases.append(Probe("relu2", relu, {}))
    cases.append(Probe("float64", make_inputs(random_routing(4, 3, 1), 7, 5, 3, activation="swiglu_oai"), {}))
    return cases


PROBES = probes()


def layer_arguments(probe: Probe) -> tuple[Any, ...]:
    i = probe.inputs
    return (i.x, i.topk_idx, i.topk_weights, i.w_gate_up, i.w_down, i.bias_gate_up, i.bias_down)


def with_grad(args: tuple[Any, ...], asked: bool) -> tuple[Any, ...]:
    """Same tensors and strides; floating ones that require grad, or not."""
    return tuple(
        a.detach().requires_grad_(asked) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )


def forward_arguments(probe: Probe, needs: int) -> tuple[Any, ...]:
    i = probe.inputs
    oai = i.activation == "swiglu_oai"
    options = (i.activation, 1.702 if oai else 1.0, 7.0 if oai else float("inf"), "reference", needs)
    return (*layer_arguments(probe), None, None, i.num_experts, *options, probe.options.get("recompute", False))


def backward_arguments(probe: Probe, needs: int) -> tuple[Any, ...]:
    args = forward_arguments(probe, needs)
    y, *saved = torch.ops.moe.layer_forward(*args)
    dy = torch.randn(y.shape).to(y.dtype)
    return (dy, *layer_arguments(probe), *saved, *args[-6:])


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
@pytest.mark.parametrize("asked", [False, True], ids=["no grad", "grad"])
def test_a18_dispatch_gemm_combine(probe: Probe, asked: bool) -> None:
    i = probe.inputs
    options = {"num_experts": i.num_experts, "activation": i.activation, **probe.options}
    torch.library.opcheck(
        torch.ops.moe.dispatch_gemm_combine.default, with_grad(layer_arguments(probe), asked), options
    )


def test_a18_main_grads() -> None:
    i = make_inputs(random_routing(6, E, K), 10, 6, dtype=torch.bfloat16)
    for gate_up, down in ((i.w_gate_up, None), (None, i.w_down), (i.w_gate_up, i.w_down)):
        main = [None if w is None else torch.zeros(w.shape) for w in (gate_up, down)]
        args = (i.x, i.topk_idx, i.topk_weights, i.w_gate_up, i.w_down, None, None)
        torch.library.opcheck(
            torch.ops.moe.dispatch_gemm_combine.default, (*with_grad(args, True), *main), {"num_experts": E}
        )


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
@pytest.mark.parametrize("asked", [False, True], ids=["no grad", "grad"])
def test_a18_layer_forward(probe: Probe, asked: bool) -> None:
    needs = 63 if asked else 0
    torch.library.opcheck(torch.ops.moe.layer_forward.default, with_grad(forward_arguments(probe, needs), asked))


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_a18_layer_backward(probe: Probe) -> None:
    masks = (63, 0b001100) if probe.inputs.bias_down is not None else (15, 0b0010)
    for needs in masks:
        torch.library.opcheck(torch.ops.moe.layer_backward.default, backward_arguments(probe, needs))


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_a18_layer_backward_accumulate(probe: Probe) -> None:
    *args, activation, alpha, limit, backend, needs, recompute = backward_arguments(probe, 15)
    i = probe.inputs
    for gate_up, down in ((True, True), (True, False)):
        main = [
            torch.zeros(w.shape, dtype=i.topk_weights.dtype) if given else i.x.new_empty(0)
            for w, given in ((i.w_gate_up, gate_up), (i.w_down, down))
        ]
        options = (activation, alpha, limit, backend, needs, recompute)
        torch.library.opcheck(torch.ops.moe.layer_backward_accumulate.default, (*args, *main, *options))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_a18_route(tokens: int, dtype: torch.dtype) -> None:
    ids = random_routing(tokens, 5, 3, drop=0.3).to(dtype)
    for layout in (ids, ids.t().contiguous().t(), ids[:, ::2]):
        torch.library.opcheck(torch.ops.moe.route.default, (layout, 5))


def assert_fake_agrees(op: Any, args: tuple[Any, ...]) -> None:
    """Sizes, strides, dtypes and devices of the results on fake tensors are those of real ones; none is an input."""
    real = op(*args)
    mode = FakeTensorMode()
    fake_args = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
    with mode:
        fake = op(*fake_args)
    inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor) and a.numel()}
    for i, (r, f) in enumerate(zip(real, fake, strict=True)):
        assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device), i
        assert r.storage_offset() == 0
        assert not r.numel() or r.untyped_storage().data_ptr() not in inputs, f"result {i} shares memory with an input"


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.name)
def test_a18_fakes_agree(probe: Probe) -> None:
    for needs in (0, 15):
        assert_fake_agrees(torch.ops.moe.layer_forward, forward_arguments(probe, needs))
    for needs in range(64 if probe.inputs.bias_down is not None else 16):
        assert_fake_agrees(torch.ops.moe.layer_backward, backward_arguments(probe, needs))
    assert_fake_agrees(torch.ops.moe.route, (probe.inputs.topk_idx, probe.inputs.num_experts))
