"""What the forward hands to the kernels and returns, with a stand-in for the launch on the CPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hopper.stand_in import Calls, note_launches
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_megakernel import _native, config, inner_ops, workspace_bytes
from moe_megakernel.errors import MoEError
from moe_megakernel.hopper import forward
from moe_megakernel.hopper.launch import LaunchSizes
from moe_megakernel.hopper.ops import ACTIVATION_NUMBERS
from moe_megakernel.hopper.testing import fault, logged, most_records
from moe_megakernel.plan_names import Counter
from moe_megakernel.schemas import Inputs, Options

EXPERTS, HIDDEN, WIDTH, TOP_K = 3, 16, 8, 2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return note_launches(monkeypatch, forward)


def make_call(tokens: int = 5, needs: int = 0, backend: str = "mega", activation: str = "swiglu") -> tuple[Any, ...]:
    columns = WIDTH if activation == "relu2" else 2 * WIDTH
    inputs = Inputs(
        torch.randn(tokens, HIDDEN, dtype=torch.bfloat16),
        torch.randint(0, EXPERTS, (tokens, TOP_K)),
        torch.rand(tokens, TOP_K),
        torch.randn(EXPERTS, columns, HIDDEN, dtype=torch.bfloat16),
        torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16),
        None,
        torch.randn(EXPERTS, HIDDEN, dtype=torch.bfloat16),
        None,
        None,
    )
    return (*inputs, EXPERTS, *Options(activation, 1.0, math.inf, backend, needs, False))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("needs", [0, 63])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_results_look_as_the_fake_says(launches: Calls, tokens: int, needs: int, activation: str) -> None:
    call = make_call(tokens, needs, activation=activation)
    results = inner_ops._forward(*call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = torch.ops.moe.layer_forward(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in call))
    assert [(r.shape, r.dtype, r.stride()) for r in results] == [(f.shape, f.dtype, f.stride()) for f in fakes]
    assert len(launches) == (tokens > 0)
    if tokens == 0:
        assert not results[3].any(), "no rows for any expert"


def test_the_launch_gets_what_it_needs(launches: Calls) -> None:
    call = make_call(needs=63, backend="staged")
    y, h, _, offsets, row_route = inner_ops._forward(*call)
    (given,) = launches
    for name, result in (("y", y), ("h", h), ("expert_offsets", offsets), ("row_route", row_route)):
        assert given[name] is result
    for name, tensor in zip(Inputs._fields[:7], call[:7], strict=True):
        assert given[name] is tensor
    assert given["workspace"].numel() == 1005
    assert given["log"] is None
    options = ("num_experts", "activation", "alpha", "limit", "staged", "num_sms", "timeout_ns", "skip_counter")
    assert [given[name] for name in options] == [EXPERTS, 0, 1.0, math.inf, True, 132, 2_500_000_000, -1]


@pytest.mark.parametrize(("asked", "taken"), [(None, 132), (64, 64), (200, 132)])
def test_sms(launches: Calls, monkeypatch: pytest.MonkeyPatch, asked: int | None, taken: int) -> None:
    monkeypatch.setattr(config, "_num_sms", asked)
    inner_ops._forward(*make_call())
    assert launches[0]["num_sms"] == taken
    assert launches[0]["staged"] is False


def test_tensors_that_do_not_fit_are_copied(launches: Calls) -> None:
    call = list(make_call())
    call[0] = torch.randn(HIDDEN, 5, dtype=torch.bfloat16).t()
    call[4] = torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=torch.bfloat16).transpose(1, 2)
    inner_ops._forward(*call)
    for name, tensor in (("x", call[0]), ("w_down", call[4])):
        assert launches[0][name].is_contiguous()
        assert torch.equal(launches[0][name], tensor)


def test_capture_is_refused_only_where_the_host_reads_counts(launches: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MoEError("capture")

    monkeypatch.setattr(inner_ops, "_refuse_capture", refuse)
    inner_ops._forward(*make_call())
    assert len(launches) == 1
    with pytest.raises(MoEError, match="capture"):
        inner_ops._forward(*make_call(backend="reference"))


def test_hooks_of_tests_reach_the_launch(launches: Calls) -> None:
    call = make_call(tokens=7, backend="staged", activation="relu2")
    with fault(Counter.X_READY, 2), logged() as logs:
        inner_ops._forward(*call)
    inner_ops._forward(*call)
    sizes = LaunchSizes(7, TOP_K, EXPERTS, HIDDEN, WIDTH, False, True, 132)
    assert launches[0]["log"] is logs[0]
    assert len(logs[0]) == 1 + 5 * most_records(sizes)
    assert [launches[0][name] for name in ("skip_counter", "skip_index")] == [Counter.X_READY, 2]
    assert [launches[1][name] for name in ("log", "skip_counter", "skip_index")] == [None, -1, 0]


def test_numbers_of_activations_are_those_of_the_header() -> None:
    header = Path(__file__).resolve().parents[2] / "kernels/include/moe/forward/arguments.h"
    (line,) = re.findall(r"enum class Activation .*\{(.*)\};", header.read_text())
    names = {re.sub(r"(?<=[a-z])([A-Z])", r"_\1", n).lower(): int(v) for n, v in re.findall(r"k(\w+) = (\d)", line)}
    assert names == ACTIVATION_NUMBERS


def test_workspace_bytes_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_megakernel import workspace

    if not _native.load_cuda():
        with pytest.raises(ValueError, match="backend: expected one in this build, got 'mega': "):
            workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K, backend="mega")
    with pytest.raises(ValueError, match="expected one of mega, staged, reference, got 'fast'"):
        workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K, backend="fast")
    with pytest.raises(ValueError, match=r"workspace_bytes: x: expected bfloat16, got float32 \(with backend 'mega'\)"):
        workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K, backend="mega", dtype=torch.float32)
    monkeypatch.setattr(_native, "load_cuda", lambda: True)
    monkeypatch.setattr(workspace, "forward_kernel_bytes", lambda *a: sum(a))
    monkeypatch.setattr(workspace, "backward_kernel_bytes", lambda *a: 2 * sum(a))
    sizes = workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K, backend="staged", num_sms=100)
    figures = 5 + TOP_K + EXPERTS + HIDDEN + WIDTH + True + True + 100
    saved = {n: s for n, s in workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K).items() if n.startswith("saved.")}
    assert sizes == {**saved, "forward.workspace": figures, "backward.workspace": 2 * figures}
    inference = workspace_bytes(5, HIDDEN, WIDTH, EXPERTS, TOP_K, backend="mega", num_sms=100, training=False)
    assert inference == {"forward.workspace": figures - 1}


def test_workspace_bytes_of_the_kernels_between_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of one route a token, with the rows that a rank can receive and its own experts."""
    from moe_megakernel import workspace

    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_native, "load_cuda", lambda: True)
    monkeypatch.setattr(workspace, "forward_kernel_bytes", lambda *a: asked.append(a) or 1000)
    monkeypatch.setattr(workspace, "backward_kernel_bytes", lambda *a: asked.append(a) or 2000)
    figures = {"tokens": 5, "hidden": HIDDEN, "expert_width": WIDTH, "num_experts": EXPERTS, "top_k": TOP_K, "ranks": 2}
    reference = workspace_bytes(**figures, rank=1)
    sizes = workspace_bytes(**figures, rank=1, backend="mega", num_sms=100)
    rows, experts = 2 * 5 * TOP_K, EXPERTS // 2
    assert asked == 2 * [(rows, 1, experts, HIDDEN, WIDTH, True, False, 100)]
    around = {name: size for name, size in reference.items() if not name.endswith(".expert")}
    kernels = {"forward.workspace": 1000, "backward.workspace": 2000, "forward.row_tables": 12 * rows}
    assert sizes == {**around, **kernels}
    asked.clear()
    for nothing in ({"row_capacity": 0}, {"num_experts": 1, "rank": 1}):
        sizes = workspace_bytes(**{**figures, **nothing}, backend="mega")
        assert sizes["forward.workspace"] == sizes["backward.workspace"] == 0
    assert not asked
