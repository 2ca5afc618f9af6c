"""What the kernels can run, and what runs where they cannot."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

import pytest
import torch

import moe_megakernel
from moe_megakernel import backends, config, ops
from moe_megakernel.hopper import support
from moe_megakernel.hopper.support import BackendChoice, kernel_fault, settle_backend

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _no_warning_given_yet() -> Iterator[None]:
    support._warned.clear()
    yield
    support._warned.clear()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ((BF16, 64, 32, 8), ""),
        ((BF16, 8, 8, 1024), ""),
        ((torch.float32, 64, 32, 8), "x: expected bfloat16, got float32"),
        ((torch.float16, 64, 32, 8), "x: expected bfloat16, got float16"),
        ((BF16, 12, 32, 8), "w_down: expected H and I to be multiples of 8, got H = 12, I = 32"),
        ((BF16, 64, 36, 8), "w_down: expected H and I to be multiples of 8, got H = 64, I = 36"),
        ((BF16, 64, 32, 1025), "num_experts: expected at most 1024, got 1025"),
    ],
)
def test_faults(call: tuple, fault: str) -> None:
    assert kernel_fault(*call) == fault


def test_most_experts_are_those_of_the_route_kernel() -> None:
    from pathlib import Path

    header = Path(__file__).resolve().parents[2] / "kernels/include/moe/plan/plan_scratch.h"
    (limit,) = re.findall(r"kMaxRouteExperts = (\d+);", header.read_text())
    assert int(limit) == support.MAX_EXPERTS


@pytest.mark.parametrize("asked", ["mega", "staged"])
def test_a_named_backend_falls_back_with_one_warning_a_reason(asked: str) -> None:
    with pytest.warns(UserWarning, match=f"expected a call that '{asked}' can run, got x: .*; the reference") as seen:
        assert settle_backend(asked, asked, "x: expected bfloat16, got float32") == "reference"
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settle_backend(asked, asked, "x: expected bfloat16, got float32") == "reference"
    with pytest.warns(UserWarning, match="float16"):
        settle_backend(asked, asked, "x: expected bfloat16, got float16")


def test_auto_falls_back_silently_and_a_call_without_fault_stays() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settle_backend("auto", "mega", "anything") == "reference"
        assert settle_backend("reference", "reference", "anything") == "reference"
        assert settle_backend("auto", "mega", "") == "mega"
        assert settle_backend("staged", "staged", "") == "staged"


def test_the_op_settles_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has the kernels, here the CPU in disguise."""
    monkeypatch.setattr(ops, "select_backend", lambda asked, kind, capability: "mega" if asked == "auto" else asked)
    x, idx, scores = torch.randn(4, 12), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    weights = torch.randn(2, 16, 12), torch.randn(2, 12, 8)
    with pytest.warns(UserWarning, match="got x: expected bfloat16, got float32"):
        named = torch.ops.moe.dispatch_gemm_combine(x, idx, scores, *weights, num_experts=2, backend="mega")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto = torch.ops.moe.dispatch_gemm_combine(x, idx, scores, *weights, num_experts=2)
    assert torch.equal(named, auto)


def test_backend_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = moe_megakernel.backend_for(64, 32, 8, device="cpu")
    assert on_cpu == ("reference", "needs a CUDA device, found cpu")
    with pytest.raises(ValueError, match="backend: expected one usable here"):
        moe_megakernel.backend_for(64, 32, 8, device="cpu", backend="mega")
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    monkeypatch.setattr(support, "device_capability", lambda device: (9, 0))
    assert moe_megakernel.backend_for(64, 32, 8) == BackendChoice("mega", "")
    assert moe_megakernel.backend_for(64, 32, 8, backend="staged") == ("staged", "")
    assert moe_megakernel.backend_for(64, 32, 8, backend="reference") == ("reference", "asked for")
    assert moe_megakernel.backend_for(64, 32, 8, dtype=torch.float32).backend == "reference"


def test_number_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_num_sms", None)
    monkeypatch.delenv("MOE_MEGAKERNEL_NUM_SMS", raising=False)
    assert moe_megakernel.get_num_sms() is None
    monkeypatch.setenv("MOE_MEGAKERNEL_NUM_SMS", "64")
    assert moe_megakernel.get_num_sms() == 64
    moe_megakernel.set_num_sms(100)
    assert moe_megakernel.get_num_sms() == 100
    moe_megakernel.set_num_sms(None)
    for text in ("63", "0", "-2", "many"):
        monkeypatch.setenv("MOE_MEGAKERNEL_NUM_SMS", text)
        message = f"MOE_MEGAKERNEL_NUM_SMS: expected an even number >= 2, got '{text}'"
        with pytest.raises(ValueError, match=re.escape(message)):
            moe_megakernel.get_num_sms()
    for count in (1, 0, -2, 7):
        with pytest.raises(ValueError, match=f"set_num_sms: count: expected an even number >= 2 or None, got {count}"):
            moe_megakernel.set_num_sms(count)
