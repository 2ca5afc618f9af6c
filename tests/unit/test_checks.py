"""The quick verdict on an ordinary call: it never passes what the checks refuse, and passes ordinary calls."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_megakernel.activations import resolve_activation
from moe_megakernel.checks import check_arguments, surely_fits
from moe_megakernel.schemas import Inputs

T, K, E, H, WIDTH = 5, 2, 3, 16, 8


def make_inputs(activation: str, dtype: torch.dtype = torch.bfloat16, biases: bool = True) -> Inputs:
    columns = WIDTH if activation == "relu2" else 2 * WIDTH

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    return Inputs(
        new(T, H),
        torch.zeros(T, K, dtype=torch.int32),
        torch.zeros(T, K),
        new(E, columns, H),
        new(E, H, WIDTH),
        new(E, columns) if biases else None,
        new(E, H) if biases else None,
        None,
        None,
    )


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("biases", [False, True])
def test_ordinary_calls_pass(activation: str, dtype: torch.dtype, biases: bool) -> None:
    assert surely_fits(make_inputs(activation, dtype, biases), E, resolve_activation(activation))


def spoil(rng: random.Random, tensor: Tensor) -> Tensor:
    """The same with another shape, dtype or device."""
    kind = rng.choice(["dtype", "device", "size", "dims", "empty"])
    if kind == "dtype":
        others = {torch.int32, torch.int64, torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8}
        return tensor.to(rng.choice(sorted(others - {tensor.dtype}, key=str)))
    if kind == "device":
        return tensor.to("meta")
    if kind == "dims":
        return rng.choice([tensor[None], tensor[0], tensor.flatten()])
    shape = list(tensor.shape)
    axis = rng.randrange(len(shape))
    shape[axis] = 0 if kind == "empty" else shape[axis] + rng.choice([-1, 1])
    return tensor.new_empty(shape)


@pytest.mark.parametrize("seed", range(100))
def test_what_the_checks_refuse_never_passes(seed: int) -> None:
    rng = random.Random(seed)
    activation = rng.choice(["swiglu", "relu2"])
    inputs = list(make_inputs(activation))
    for _ in range(rng.choice([1, 1, 2, 3])):
        position = rng.randrange(7)
        tensor = inputs[position]
        assert tensor is not None
        inputs[position] = spoil(rng, tensor) if rng.random() < 0.9 else None if position > 4 else tensor
        if inputs[position] is None or inputs[position].dim() == 0:
            break
    num_experts = rng.choice([E, E, E, E - 1, E + 1, 0, -1])
    given, act = Inputs(*inputs), resolve_activation(rng.choice([activation, activation, "swiglu", "relu2"]))
    try:
        check_arguments(given, num_experts, 0, 1, act, -1)
    except (TypeError, ValueError):
        assert not surely_fits(given, num_experts, act)
    else:
        assert surely_fits(given, num_experts, act) or given.topk_weights.dtype == torch.float64
