"""Expert counts, auxiliary losses and the bias step against plain arithmetic."""

from __future__ import annotations

import pytest
import torch

from moe_megakernel.balance import bias_step, expert_counts, load_balancing_loss, router_z_loss


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Tests share code objects, whose compiled versions are limited in number."""
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts(dtype: torch.dtype) -> None:
    idx = torch.tensor([[0, 2], [2, -1], [2, 2], [-1, -1]], dtype=dtype)
    counts = expert_counts(idx, 4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 0, 4, 0]
    assert expert_counts(idx[:0], 4).tolist() == [0, 0, 0, 0]
    assert expert_counts(torch.tensor([[7, -9], [4, 3]], dtype=dtype), 4).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_load_balancing_loss_equals_the_formula(scores: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    idx = torch.randint(0, 6, (4, 5, 2))
    f = [float((idx == e).sum()) / 40 for e in range(6)]
    rows = logits.detach().reshape(20, 6)
    table = rows.exp() if scores == "softmax" else 1 / (1 + (-rows).exp())
    p = [sum(float(row[e] / row.sum()) for row in table) / 20 for e in range(6)]
    expected = 6 * sum(a * b for a, b in zip(f, p, strict=True))
    assert load_balancing_loss(logits, idx, scores=scores).item() == pytest.approx(expected, rel=1e-12)
    torch.autograd.gradcheck(lambda z: load_balancing_loss(z, idx, scores=scores), logits)
    counts = torch.tensor([8.0, 0, 0, 0, 0, 0])
    given = load_balancing_loss(logits, idx, scores=scores, counts=counts)
    assert given.item() == pytest.approx(6 * p[0], rel=1e-12)


def test_load_balancing_loss_at_its_ends() -> None:
    balanced = torch.arange(8).reshape(4, 2) % 4
    assert float(load_balancing_loss(torch.zeros(4, 4), balanced)) == pytest.approx(1)
    collapsed = torch.tensor([[50.0, 0, 0, 0]] * 3)
    assert float(load_balancing_loss(collapsed, torch.zeros(3, 1, dtype=torch.long))) == pytest.approx(4)
    with pytest.raises(ValueError, match="load_balancing_loss: scores: expected softmax or sigmoid, got 'relu'"):
        load_balancing_loss(collapsed, balanced, scores="relu")


def test_z_loss() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    expected = sum(float(row.exp().sum().log()) ** 2 for row in logits.detach()) / 3
    assert router_z_loss(logits).item() == pytest.approx(expected, rel=1e-12)
    torch.autograd.gradcheck(router_z_loss, logits)
    assert router_z_loss(logits.bfloat16()).dtype == torch.float32


def test_no_tokens_give_zero_losses_and_gradients() -> None:
    logits = torch.zeros(0, 4, requires_grad=True)
    loss = load_balancing_loss(logits, torch.zeros(0, 2, dtype=torch.long)) + router_z_loss(logits)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 4)


def test_losses_compile_whole_with_changing_batches() -> None:
    def total(logits: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return load_balancing_loss(logits, idx) + 1e-3 * router_z_loss(logits)

    compiled = torch.compile(total, fullgraph=True, dynamic=True)
    for tokens in (0, 5, 9, 16):
        logits = torch.randn(tokens, 6)
        idx = torch.randint(-1, 6, (tokens, 2))
        torch.testing.assert_close(compiled(logits, idx), total(logits, idx))


def test_bias_step_is_exact() -> None:
    assert bias_step(torch.tensor([3, 3, 3]), 0.5).tolist() == [0, 0, 0]
    large = 2**40
    assert bias_step(torch.tensor([large, large + 1, large - 1]), 0.5).tolist() == [0, -0.5, 0.5]
    assert bias_step(torch.zeros(3), 0.5).tolist() == [0, 0, 0]
