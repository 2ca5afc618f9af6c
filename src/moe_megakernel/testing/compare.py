"""Comparison of results: relative Frobenius error and bit equality, with messages that carry numbers.

Used by the test suite; shipped so that a bug report can use the same measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: Relative Frobenius error that bfloat16 results may have against float64 at O(1) inputs.
BF16_FORWARD = 5e-3
BF16_GRADIENT = 1e-2


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; 0 for two zero or empty tensors, infinity for NaN."""
    if actual.shape != expected.shape:
        raise ValueError(f"relative_error: actual: expected shape {list(expected.shape)}, got {list(actual.shape)}")
    a, e = actual.detach().double().cpu(), expected.detach().double().cpu()
    difference, norm = float((a - e).norm()), float(e.norm())
    if difference == 0:
        return 0.0
    ratio = difference / norm if norm > 0 else float("inf")
    return ratio if ratio == ratio else float("inf")


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float, name: str = "tensor") -> None:
    """Fails unless both are None, or the relative Frobenius error is at most `tolerance`."""
    if actual is None or expected is None:
        assert actual is expected, f"{name}: expected {_kind(expected)}, got {_kind(actual)}"
        return
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{name}: expected a relative error of at most {tolerance:.1e}, got {error:.3e}"


def assert_equal_bits(actual: Tensor | None, expected: Tensor | None, name: str = "tensor") -> None:
    """Fails unless both are None, or dtype, shape and every bit agree (NaN equals the same NaN)."""
    if actual is None or expected is None:
        assert actual is expected, f"{name}: expected {_kind(expected)}, got {_kind(actual)}"
        return
    assert actual.dtype == expected.dtype, f"{name}: expected {expected.dtype}, got {actual.dtype}"
    assert actual.shape == expected.shape, f"{name}: expected shape {expected.shape}, got {actual.shape}"
    a, e = _bytes(actual), _bytes(expected)
    if not torch.equal(a, e):
        error = relative_error(actual, expected)
        raise AssertionError(
            f"{name}: expected equal bits, got {int((a != e).sum())} bytes off, relative error {error:.3e}"
        )


def _bytes(tensor: Tensor) -> Tensor:
    # A copy, since `contiguous` leaves the stride of a single element as it is, and bytes cannot be viewed with it.
    return tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, `torch.empty` and its kin return NaN and the largest integers instead of whatever the pages held."""
    was = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        deterministic.fill_uninitialized_memory = fill


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor of shape {list(tensor.shape)}"
