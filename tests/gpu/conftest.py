"""Fixtures of the tests on a CUDA device: kernels that are there, and settings and errors that are not left."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.gpu.layers import missing_kernels, set_num_sms

import moe_megakernel

# Without it, torch may refuse cuBLAS under `use_deterministic_algorithms`, which poisoned memory is made with.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def kernels() -> Iterator[None]:
    """Skips without a device that the fused kernels run on; afterwards no error may be left."""
    reason = missing_kernels()
    if reason:
        pytest.skip(reason)
    yield
    moe_megakernel.check_errors()


@pytest.fixture
def short_timeout(kernels: None) -> Iterator[None]:
    """Waits of the kernels end after a second."""
    before = moe_megakernel.get_timeout()
    moe_megakernel.set_timeout(1.0)
    yield
    moe_megakernel.set_timeout(before)


@pytest.fixture
def few_sms(kernels: None) -> Iterator[None]:
    """Launches take eight SMs, so that rings of a small layer turn over."""
    set_num_sms(8)
    yield
    set_num_sms(None)
