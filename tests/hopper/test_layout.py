"""Tensors as the kernels read them: what is taken as it lies, and what is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_megakernel.hopper.layout import aligned_bias, aligned_rows, aligned_weight, separate_rows


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


ROWS_TAKEN = {
    "contiguous": lambda: numbers(6, 16),
    "every other row": lambda: numbers(12, 16)[::2],
    "left columns": lambda: numbers(6, 32)[:, :16],
    "right columns": lambda: numbers(6, 32)[:, 16:],
    "one row for all": lambda: numbers(1, 16).expand(6, 16),
    "overlapping rows": lambda: numbers(16 + 5 * 8).as_strided((6, 16), (8, 1)),
    "one row with any stride": lambda: numbers(40).as_strided((1, 16), (3, 1)),
}
ROWS_COPIED = {
    "columns first": lambda: numbers(16, 6).t(),
    "odd row stride": lambda: numbers(6, 20)[:, :16],
    "shifted columns": lambda: numbers(6, 32)[:, 4:20],
    "shifted storage": lambda: numbers(6 * 16 + 1)[1:].view(6, 16),
    "every other column": lambda: numbers(6, 32)[:, ::2],
    "one number for all": lambda: numbers(1, 1).expand(6, 16),
}
#: Taken by `aligned_rows`, not by a copy to memory that ranks share.
OVERLAPPING = ("one row for all", "overlapping rows", "one row with any stride")
WEIGHTS_TAKEN = {
    "contiguous": lambda: numbers(4, 8, 16),
    "experts of a stack": lambda: numbers(4, 3, 8, 16)[:, 1],
    "experts inside rows": lambda: numbers(8, 4, 16).transpose(0, 1),
    "padded rows": lambda: numbers(4, 8, 24)[..., :16],
    "one expert with stride 0": lambda: numbers(8, 16).as_strided((1, 8, 16), (0, 16, 1)),
    "one expert with an odd stride": lambda: numbers(8, 16).as_strided((1, 8, 16), (3, 16, 1)),
}
WEIGHTS_COPIED = {
    "one expert for all": lambda: numbers(1, 8, 16).expand(4, 8, 16),
    "one row for all": lambda: numbers(4, 1, 16).expand(4, 8, 16),
    "overlapping rows": lambda: numbers(4, 8 * 16 + 16).as_strided((4, 8, 16), (144, 8, 1)),
    "overlapping experts": lambda: numbers(8 * 16 + 3 * 8).as_strided((4, 8, 16), (8, 16, 1)),
    "weights of [E, H, I] as [E, I, H]": lambda: numbers(4, 16, 8).transpose(1, 2),
    "odd expert stride": lambda: numbers(4 * 132)[:528].as_strided((4, 8, 16), (132, 16, 1)),
    "shifted storage": lambda: numbers(4 * 8 * 16 + 1)[1:].view(4, 8, 16),
}
CASES = [(aligned_rows, name, case, True) for name, case in ROWS_TAKEN.items()]
CASES += [(aligned_rows, name, case, False) for name, case in ROWS_COPIED.items()]
CASES += [(separate_rows, name, case, name not in OVERLAPPING) for name, case in ROWS_TAKEN.items()]
CASES += [(separate_rows, name, case, False) for name, case in ROWS_COPIED.items()]
CASES += [(aligned_weight, name, case, True) for name, case in WEIGHTS_TAKEN.items()]
CASES += [(aligned_weight, name, case, False) for name, case in WEIGHTS_COPIED.items()]


@pytest.mark.parametrize(("align", "name", "make", "taken"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_taken_as_it_lies_or_copied(
    align: Callable[[Tensor], Tensor], name: str, make: Callable[[], Tensor], taken: bool
) -> None:
    tensor = make()
    result = align(tensor)
    assert (result is tensor) == taken
    if not taken:
        assert result.is_contiguous()
        assert result.data_ptr() % 16 == 0
        assert torch.equal(result, tensor)
        assert align(result) is result


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
