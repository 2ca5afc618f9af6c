"""Case A09 on the fused kernels: rows times width, and weights, past 2^31 elements. Needs some tens of GB of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.gpu.layers import GPU, both_backends, oracle_by_expert, saved

from moe_megakernel.testing import BF16_FORWARD, LayerInputs, assert_close, assert_equal_bits

SAMPLE = 100
LIMIT = 2**31


@pytest.fixture
def room(kernels: None) -> Iterator[None]:
    """Skips where the device has too little memory free; gives back what the test has taken."""
    from moe_megakernel.hopper.workspaces import release_workspaces

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < 40:
        pytest.skip(f"needs 40 GiB of free device memory, found {free}")
    yield
    release_workspaces()
    gc.collect()
    torch.cuda.empty_cache()


pytestmark = [*GPU, pytest.mark.usefixtures("room")]


def make_large(tokens: int, hidden: int, width: int, experts: int, top_k: int) -> LayerInputs:
    """Random inputs made on the device; distinct experts for each token."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    return LayerInputs(
        x=normal(tokens, hidden),
        topk_idx=scores.topk(top_k).indices,
        topk_weights=torch.randn(tokens, top_k, generator=generator, device="cuda"),
        w_gate_up=normal(experts, 2 * width, hidden).mul_(hidden**-0.5),
        w_down=normal(experts, hidden, width).mul_(width**-0.5),
        bias_gate_up=None,
        bias_down=None,
        num_experts=experts,
    )


def last_tokens(inputs: LayerInputs) -> torch.Tensor:
    """y of the last tokens in float64."""
    last = replace(
        inputs,
        x=inputs.x[-SAMPLE:].double(),
        topk_idx=inputs.topk_idx[-SAMPLE:],
        topk_weights=inputs.topk_weights[-SAMPLE:].double(),
    )
    return oracle_by_expert(last)


@both_backends
def test_a09_rows_past_the_boundary(backend: str) -> None:
    """The rows of o: token 37,449 is the first of which one lies past 2^31 elements."""
    inputs = make_large(37_560, 7168, 256, experts=8, top_k=8)
    assert (inputs.x.shape[0] - SAMPLE) * 8 * 7168 >= LIMIT
    with torch.no_grad():
        y = inputs.call(backend=backend)
    assert y.isfinite().all()
    assert_close(y[-SAMPLE:], last_tokens(inputs), BF16_FORWARD, "y of the last tokens")


def test_a09_saved_h_past_the_boundary() -> None:
    """And h of as many elements, which training keeps."""
    inputs = make_large(37_560, 7168, 3584, experts=8, top_k=8)
    step = saved(inputs, "mega")
    rows = step.h.shape[0]
    assert (rows - SAMPLE) * step.h.shape[1] >= LIMIT
    assert int(step.expert_offsets[7]) <= rows - SAMPLE
    tokens = step.row_route[-SAMPLE:].long() // 8
    expected = inputs.x[tokens].double() @ inputs.w_gate_up[7].double().t()
    assert_close(step.h[-SAMPLE:], expected, BF16_FORWARD, "the last rows of h")
    assert_close(step.y[-SAMPLE:], last_tokens(inputs), BF16_FORWARD, "y of the last tokens")


def test_a09_weights_past_the_boundary() -> None:
    """Experts whose weights lie past 2^31 elements, with few tokens."""
    inputs = make_large(SAMPLE, 2048, 2048, experts=264, top_k=8)
    assert inputs.w_gate_up[0].numel() * 256 >= LIMIT
    far = torch.arange(256, 264, device="cuda").repeat(SAMPLE, 1)
    ids = torch.where((torch.arange(SAMPLE, device="cuda") % 2 == 0)[:, None], far, inputs.topk_idx)
    inputs = replace(inputs, topk_idx=ids)
    with torch.no_grad():
        y = inputs.call(backend="mega")
        assert_equal_bits(inputs.call(backend="staged"), y, "y")
    assert_close(y, last_tokens(inputs), BF16_FORWARD, "y")


def test_a09_few_routes_of_many_slots() -> None:
    """All but the last tokens are dropped: rows are few, but the slots that they go home to lie far out."""
    inputs = make_large(37_560, 7168, 256, experts=8, top_k=8)
    inputs = replace(inputs, topk_idx=inputs.topk_idx.index_fill(0, torch.arange(37_460, device="cuda"), -1))
    with torch.no_grad():
        y = inputs.call(backend="mega")
    assert not y[:-SAMPLE].any()
    assert_close(y[-SAMPLE:], last_tokens(inputs), BF16_FORWARD, "y of the last tokens")
