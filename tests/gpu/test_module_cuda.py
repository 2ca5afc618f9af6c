"""The module on a CUDA device: the CPU's numbers, ties, autocast, and a router that never waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.gpu.layers import no_host_sync
from torch import Tensor

from moe_megakernel import module
from moe_megakernel.balance import load_balancing_loss, router_z_loss
from moe_megakernel.module import MoE
from moe_megakernel.router import Router, stable_topk
from moe_megakernel.testing import assert_close, assert_equal_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {"bias": True, "correction_bias": True, "shared_expert_width": 24, "shared_expert_gate": True, "seed": 5}


def step(moe: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = moe(x)
    moe.zero_grad()
    y.backward(dy)
    grads = {name: p.grad.clone() for name, p in moe.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("style", [{}, {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}], ids=str)
def test_equals_the_cpu(style: dict) -> None:
    """In fp64, where a choice of experts does not hang on the device's order of addition."""
    host = MoE(48, 40, 8, 3, dtype=torch.float64, **OPTIONS, **style)
    device = copy.deepcopy(host).cuda()
    x, dy = torch.randn(2, 3, 37, 48, dtype=torch.float64)
    expected = step(host, x, dy)
    for name, value in step(device, x.cuda(), dy.cuda()).items():
        assert_close(value.cpu(), expected[name], 1e-12, name)
    assert torch.equal(device.last_expert_counts.cpu(), host.last_expert_counts)


def test_steps_have_equal_bits_and_compile() -> None:
    moe = MoE(64, 32, 8, 2, device="cuda", dtype=torch.bfloat16, **OPTIONS)
    x, dy = torch.randn(2, 100, 64, device="cuda", dtype=torch.bfloat16)
    first = step(moe, x, dy)
    for name, value in step(moe, x, dy).items():
        assert_equal_bits(value, first[name], name)
    for name, value in step(torch.compile(moe, fullgraph=True), x, dy).items():
        assert_close(value, first[name.removeprefix("_orig_mod.")], 1e-2, name)


def test_autocast_leaves_the_router_in_fp32() -> None:
    moe = MoE(64, 32, 8, 2, device="cuda", **OPTIONS)
    x = torch.randn(50, 64, device="cuda")
    plain = moe.router(x)
    with torch.autocast("cuda", torch.bfloat16):
        y, cast = moe(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    for mine, other in zip(cast, plain, strict=True):
        assert_equal_bits(mine, other)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in moe.parameters())


@pytest.mark.parametrize("experts", [8, 300, 4096])
def test_ties_take_the_lowest_expert_first(experts: int) -> None:
    values = torch.randint(0, 4, (500, experts)).float()
    assert torch.equal(stable_topk(values.cuda(), 8).cpu(), stable_topk(values, 8))


def test_router_and_balancing_never_wait_for_the_device() -> None:
    router = Router(64, 16, 4, correction_bias=True, num_groups=4, top_groups=2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(100, 64, device="cuda", dtype=torch.bfloat16)
    with no_host_sync():
        routing = router(x)
        counts = module.expert_counts(routing.topk_idx, 16)
        loss = load_balancing_loss(routing.logits, routing.topk_idx) + router_z_loss(routing.logits)
        (routing.topk_weights.square().sum() + loss).backward()
        router.update_correction_bias(counts)
    assert int(counts.sum()) == 400
    assert bool(router.weight.grad.any())
    assert bool(router.correction_bias.any())


def test_initial_weights_do_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = MoE(64, 32, 5, 2, device="cuda", seed=3)
    monkeypatch.setattr(module, "group_ranks", lambda _name: 2)
    monkeypatch.setattr(module, "group_rank", lambda _name: 1)
    part = MoE(64, 32, 5, 2, device="cuda", seed=3)
    assert_equal_bits(part.w_gate_up.detach(), whole.w_gate_up.detach()[3:])
    assert_equal_bits(part.router.weight.detach(), whole.router.weight.detach())
