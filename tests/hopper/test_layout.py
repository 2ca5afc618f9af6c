"""Tensors as the kernels read them: what is taken as it lies, and what is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_megakernel.hopper.layout import aligned_bias, aligned_rows


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


TAKEN = {
    "contiguous": lambda: numbers(6, 16),
    "every other row": lambda: numbers(12, 16)[::2],
    "left columns": lambda: numbers(6, 32)[:, :16],
    "right columns": lambda: numbers(6, 32)[:, 16:],
    "one row for all": lambda: numbers(1, 16).expand(6, 16),
    "experts of a stack": lambda: numbers(4, 3, 8, 16)[:, 1],
    "one expert for all": lambda: numbers(1, 8, 16).expand(4, 8, 16),
}
COPIED = {
    "columns first": lambda: numbers(16, 6).t(),
    "odd row stride": lambda: numbers(6, 20)[:, :16],
    "shifted columns": lambda: numbers(6, 32)[:, 4:20],
    "shifted storage": lambda: numbers(6 * 16 + 1)[1:].view(6, 16),
    "every other column": lambda: numbers(6, 32)[:, ::2],
    "one number for all": lambda: numbers(1, 1).expand(6, 16),
    "weights of [E, H, I] as [E, I, H]": lambda: numbers(4, 16, 8).transpose(1, 2),
    "odd expert stride": lambda: numbers(4 * 132)[:528].as_strided((4, 8, 16), (132, 16, 1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken_as_it_lies(name: str) -> None:
    tensor = TAKEN[name]()
    assert aligned_rows(tensor) is tensor


@pytest.mark.parametrize("name", COPIED)
def test_copied(name: str) -> None:
    tensor = COPIED[name]()
    copy = aligned_rows(tensor)
    assert copy.is_contiguous()
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, tensor)
    assert aligned_rows(copy) is copy


def test_biases() -> None:
    bias = numbers(4, 16)
    assert aligned_bias(None) is None
    assert aligned_bias(bias) is bias
    for other in (numbers(16, 4).t(), numbers(1, 16).expand(4, 16), numbers(65)[1:].view(4, 16)):
        copy = aligned_bias(other)
        assert copy is not None
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, other)
