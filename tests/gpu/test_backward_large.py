"""Case A09 on the fused backward: rows times width, and weights, past 2^31 elements. Needs tens of GB of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.layers import GPU, both_backends, oracle_by_expert
from tests.gpu.test_forward_large import LIMIT, SAMPLE, make_large, room  # noqa: F401  (a fixture)
from torch import Tensor

from moe_megakernel.testing import BF16_GRADIENT, LayerInputs, assert_close

pytestmark = [*GPU, pytest.mark.usefixtures("room")]


def step(inputs: LayerInputs, backend: str, **options: object) -> tuple[LayerInputs, Tensor]:
    """The inputs as leaves with their gradients, and dy; without copies of the weights."""
    leaves = replace(
        inputs,
        x=inputs.x.requires_grad_(),
        topk_weights=inputs.topk_weights.requires_grad_(),
        w_gate_up=inputs.w_gate_up.requires_grad_(),
        w_down=inputs.w_down.requires_grad_(),
    )
    y = leaves.call(backend=backend, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, device="cuda", dtype=y.dtype)
    y.backward(dy)
    return leaves, dy


def grad_of(leaves: LayerInputs, name: str) -> Tensor:
    gradient: Tensor | None = getattr(leaves, name).grad
    assert gradient is not None, name
    assert gradient.isfinite().all(), name
    return gradient


def check_last_tokens(leaves: LayerInputs, dy: Tensor) -> None:
    """dx and dS of the last tokens in float64."""
    x = leaves.x.detach()[-SAMPLE:].double().requires_grad_()
    topk_weights = leaves.topk_weights.detach()[-SAMPLE:].double().requires_grad_()
    frozen = {"w_gate_up": leaves.w_gate_up.detach(), "w_down": leaves.w_down.detach()}
    last = replace(leaves, x=x, topk_weights=topk_weights, topk_idx=leaves.topk_idx[-SAMPLE:], **frozen)
    oracle_by_expert(last).backward(dy[-SAMPLE:].double())
    assert_close(grad_of(leaves, "x")[-SAMPLE:], x.grad, BF16_GRADIENT, "dx of the last tokens")
    assert_close(grad_of(leaves, "topk_weights")[-SAMPLE:], topk_weights.grad, BF16_GRADIENT, "dS of the last tokens")


def check_expert(leaves: LayerInputs, dy: Tensor, expert: int) -> None:
    """Both weight gradients of one expert in float64."""
    token, k = (leaves.topk_idx == expert).nonzero(as_tuple=True)
    w_gate_up, w_down = (w.detach()[expert].double().requires_grad_() for w in (leaves.w_gate_up, leaves.w_down))
    gate, up = (leaves.x.detach()[token].double() @ w_gate_up.t()).chunk(2, dim=1)
    o = (F.silu(gate) * up) @ w_down.t()
    scaled = leaves.topk_weights.detach()[token, k, None].double() * dy[token].double()
    expected = torch.autograd.grad(o, (w_gate_up, w_down), scaled)
    for name, want in zip(("w_gate_up", "w_down"), expected, strict=True):
        assert_close(grad_of(leaves, name)[expert], want, BF16_GRADIENT, f"{name} of expert {expert}")


@both_backends
def test_a09_rows_past_the_boundary(backend: str) -> None:
    """Rows of dy, x and dx: token 37,449 is the first of which one lies past 2^31 elements; expert 7 is the last."""
    inputs = make_large(37_560, 7168, 256, experts=8, top_k=8)
    assert (inputs.x.shape[0] - SAMPLE) * 8 * 7168 >= LIMIT
    leaves, dy = step(inputs, backend)
    check_last_tokens(leaves, dy)
    check_expert(leaves, dy, 7)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a09_h_past_the_boundary(recompute: bool) -> None:
    """And h and dh of as many elements."""
    inputs = make_large(37_560, 7168, 3584, experts=8, top_k=8)
    leaves, dy = step(inputs, "mega", recompute=recompute)
    check_last_tokens(leaves, dy)
    check_expert(leaves, dy, 7)


def test_a09_weights_past_the_boundary() -> None:
    """Experts whose weights and weight gradients lie past 2^31 elements, with few tokens."""
    inputs = make_large(SAMPLE, 2048, 2048, experts=264, top_k=8)
    assert inputs.w_gate_up[0].numel() * 256 >= LIMIT
    far = torch.arange(256, 264, device="cuda").repeat(SAMPLE, 1)
    ids = torch.where((torch.arange(SAMPLE, device="cuda") % 2 == 0)[:, None], far, inputs.topk_idx)
    leaves, dy = step(replace(inputs, topk_idx=ids), "mega")
    check_last_tokens(leaves, dy)
    for expert in (0, 256, 263):
        check_expert(leaves, dy, expert)


def test_a09_main_gradients_past_the_boundary() -> None:
    """In float32 they are as long in elements, and twice in bytes."""
    inputs = make_large(SAMPLE, 2048, 2048, experts=264, top_k=8)
    inputs = replace(inputs, topk_idx=torch.arange(256, 264, device="cuda").repeat(SAMPLE, 1))
    main = torch.zeros(inputs.w_gate_up.shape, device="cuda")
    leaves, dy = step(inputs, "mega", main_grad_gate_up=main)
    assert not main[:256].any()
    leaves.w_gate_up.grad = main.to(torch.bfloat16)
    check_expert(leaves, dy, 263)
