"""Learning rate and clipping, against figures worked out by hand."""

import pytest
import torch

from moe_megakernel.train.optimize import MAX_GRAD_NORM, clip_gradients, learning_rate, make_optimizer


def test_warm_up_then_cosine():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == pytest.approx(1.0)
    assert rates == [*rates[:5], *sorted(rates[5:], reverse=True)]
    assert rates[5 + 95 // 2] == pytest.approx(0.525, abs=0.01)
    assert rates[-1] == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_shortest_schedules_are_positive(steps):
    assert all(0 < learning_rate(step, steps, 1.0) <= 1.0 for step in range(steps))


def test_clip_scales_to_the_norm_over_all_gradients():
    replicated, sharded = [torch.tensor([3.0])], [torch.tensor([[0.0, 4.0]])]
    assert clip_gradients(replicated, sharded, None).item() == pytest.approx(5.0)
    assert replicated[0].item() == pytest.approx(3 / 5 * MAX_GRAD_NORM)
    assert sharded[0].tolist() == [[0.0, pytest.approx(4 / 5 * MAX_GRAD_NORM)]]


def test_clip_leaves_small_gradients_to_the_bit():
    gradient = torch.tensor([0.1, 0.2])
    clip_gradients([gradient], [], None)
    assert torch.equal(gradient, torch.tensor([0.1, 0.2]))


def test_vectors_are_not_decayed():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([vector, matrix], lr=0.1)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.equal(vector, torch.ones(2))
    assert (matrix < 1).all()
