"""Case A19: activation checkpointing, whole and selective, with the router inside and outside, also under ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.steps import Results, assert_same_bits, make_dy, name_of
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_megakernel.testing import LayerInputs, make_inputs, poisoned_memory, random_routing

E, K = 4, 2
PARAMETERS = ("w_gate_up", "w_down", "bias_gate_up", "bias_down")
ROUTERS = ["inside", "outside"]
LOGITS = ["distinct", "all tied", "equal rows"]
LAYER = torch.ops.moe.layer_forward.default
#: What a policy says about the layer -> how often it then runs in a step of two blocks.
DECISIONS = {CheckpointPolicy.MUST_SAVE: 2, CheckpointPolicy.MUST_RECOMPUTE: 4}


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax((x @ router.t()).float(), dim=-1).topk(K, dim=-1)
    return weights, ids


def block(
    x: Tensor,
    router: Tensor,
    weights: Tensor | None,
    ids: Tensor | None,
    leaves: LayerInputs,
    options: dict[str, Any],
) -> Tensor:
    """Router (unless its results are given), layer and residual."""
    if weights is None or ids is None:
        weights, ids = route(x, router)
    layer = replace(leaves, x=torch.tanh(x), topk_idx=ids, topk_weights=weights.to(leaves.topk_weights.dtype))
    return x + layer.call(**options)


def training_step(
    values: LayerInputs, router_values: Tensor, where: str, wrap: Callable[..., Any], **options: Any
) -> Results:
    """Two blocks after each other, each wrapped; y and all gradients."""
    leaves, router = values.leaves(), router_values.clone().requires_grad_()
    y = leaves.x
    for _ in range(2):
        weights, ids = route(y, router) if where == "outside" else (None, None)
        y = wrap(block, y, router, weights, ids, leaves, options)
    y.backward(make_dy(y))
    grads = {name: getattr(leaves, name).grad for name in ("x", *PARAMETERS)}
    return {"y": y.detach(), "router": router.grad, **grads}


def plain(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def make_values(logits: str, dtype: torch.dtype) -> tuple[LayerInputs, Tensor]:
    values = make_inputs(random_routing(8, E, K), bias=True, dtype=dtype)
    router = torch.randn(E, 64).to(dtype) / 8
    if logits == "all tied":
        router = router[:1].expand(E, 64).clone()
    if logits == "equal rows":
        values = replace(values, x=values.x[:1].expand(8, 64).contiguous())
    return values, router


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts runs of the experts' forward, the expensive part."""
    from moe_megakernel.reference import layer

    calls = [0]
    function = layer.experts_forward

    def counting(*args: Any) -> Tensor:
        calls[0] += 1
        return function(*args)

    monkeypatch.setattr(layer, "experts_forward", counting)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("where", ROUTERS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a19_checkpoint(
    reentrant: bool, where: str, logits: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, router = make_values(logits, dtype)
    with poisoned_memory():
        expected = training_step(values, router, where, plain)
        calls = count_forwards(monkeypatch)
        for options in ({}, {"recompute": True}):
            wrap = partial(checkpoint, use_reentrant=reentrant)
            assert_same_bits(training_step(values, router, where, wrap, **options), expected)
    assert calls[0] == 8  # two blocks, forward and again in backward, twice


def policy(decision: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """Saves or recomputes the layer, and recomputes everything else."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return decision if op is LAYER else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def selective(decision: CheckpointPolicy) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, policy(decision))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("where", ROUTERS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_a19_selective(decision: CheckpointPolicy, where: str, logits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that names `torch.ops.moe.layer_forward` decides whether it runs once or twice."""
    values, router = make_values(logits, torch.float32)
    with poisoned_memory():
        expected = training_step(values, router, where, plain)
        calls = count_forwards(monkeypatch)
        assert_same_bits(training_step(values, router, where, selective(decision)), expected)
    assert calls[0] == DECISIONS[decision]


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("where", ROUTERS)
def test_a19_selective_compiled(decision: CheckpointPolicy, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same policies inside a compiled region; the layer runs as often as the policy says."""
    values, router = make_values("distinct", torch.float32)
    expected = training_step(values, router, where, plain)
    torch._dynamo.reset()
    compiled = torch.compile(partial(training_step, wrap=selective(decision)), backend="aot_eager")
    calls = count_forwards(monkeypatch)
    assert_same_bits(compiled(values, router, where), expected)
    assert calls[0] == DECISIONS[decision]


def test_a19_saved_shapes_depend_on_inputs_only() -> None:
    """What the layer saves has the same shapes for any routing of the same T and K."""
    shapes = []
    some = random_routing(8, E, K, drop=0.5)
    for ids in (random_routing(8, E, K), torch.full((8, K), 3), torch.full((8, K), -1), some):
        leaves = make_inputs(ids, bias=True, dtype=torch.float32).leaves()
        saved: list[torch.Size] = []

        def pack(tensor: Tensor, saved: list[torch.Size] = saved) -> Tensor:
            saved.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            leaves.call()
        shapes.append(saved)
    assert all(s == shapes[0] for s in shapes)
