"""`workspace_bytes` against the tensors that a step really makes, and against figures by hand for several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.steps import ALL_DTYPES, make_dy, name_of
from torch import Tensor

from moe_megakernel import workspace_bytes
from moe_megakernel.reference import layer
from moe_megakernel.testing import make_inputs, random_routing

T, H, I, E, K = 24, 40, 12, 5, 3  # noqa: E741


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Collects the bytes of what a function of `reference.layer` returns."""
    sizes: list[int] = []
    function: Callable[..., Any] = getattr(layer, name)

    def wrapper(*args: Any) -> Any:
        result = function(*args)
        if isinstance(result, Tensor):
            sizes.append(result.nbytes)
        else:
            sizes.extend(0 if t is None else t.nbytes for t in (result.dx_rows, result.ds_rows))
        return result

    monkeypatch.setattr(layer, name, wrapper)
    return sizes


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=name_of)
def test_one_rank(dtype: torch.dtype, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = workspace_bytes(T, H, I, E, K, dtype=dtype, activation=activation)
    leaves = make_inputs(random_routing(T, E, K), H, I, E, dtype=dtype, activation=activation).leaves()
    gathered, scattered = spy(monkeypatch, "gather_rows"), spy(monkeypatch, "scatter_rows")
    forward, backward = spy(monkeypatch, "experts_forward"), spy(monkeypatch, "experts_backward")
    saved: dict[tuple[int, ...], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tuple(tensor.shape)] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = leaves.call()
    y.backward(make_dy(y))
    width = leaves.w_gate_up.shape[1]
    assert sizes["saved.h"] == saved[T * K, width]
    assert sizes["saved.expert_offsets"] == saved[(E + 1,)]
    assert sizes["saved.row_route"] == saved[(T * K,)]
    assert [sizes["forward.x_rows"], sizes["backward.dy_rows"], sizes["backward.x_rows"]] == gathered
    assert [sizes["forward.o_rows"]] == forward
    assert [sizes["backward.dx_rows"], sizes["backward.ds_rows"]] == backward
    assert [sizes["forward.o_routes"], sizes["backward.dx_routes"]] == scattered[:2]
    counts = torch.ops.moe.route(leaves.topk_idx, E)[1]
    assert sizes["forward.class_counts"] == counts.nbytes


def test_several_ranks() -> None:
    sizes = workspace_bytes(T, H, I, E, K, dtype=torch.bfloat16, ranks=2, rank=1)
    rows, routes = 2 * T * K, T * K
    assert sizes["saved.h"] == rows * 2 * I * 2
    assert sizes["saved.expert_offsets"] == 4 * (2 + 1)  # 5 experts on two ranks are 3 and 2
    assert sizes["saved.row_order"] == 4 * rows
    assert sizes["saved.route_order"] == 4 * routes
    assert sizes["saved.splits"] == 8 * 2 * 2
    assert sizes["forward.x_sent"] == sizes["forward.o_arrived"] == routes * H * 2
    assert sizes["forward.x_rows"] == sizes["backward.dy_rows"] == rows * H * 2
    assert "saved.row_route" not in sizes
    larger = workspace_bytes(T, H, I, E, K, ranks=2, rank=1, row_capacity=7)
    assert larger["saved.h"] == 7 * 2 * I * 2


def test_inference_and_recompute() -> None:
    assert workspace_bytes(T, H, I, E, K, recompute=True)["saved.h"] == 0
    inference = workspace_bytes(T, H, I, E, K, training=False)
    assert not [name for name in inference if not name.startswith("forward.")]
    training = workspace_bytes(T, H, I, E, K)
    assert inference.items() <= training.items()
    assert all(size >= 0 for size in workspace_bytes(0, 1, 1, 1, 1).values())


MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"tokens": -1}, "workspace_bytes: tokens: expected at least 0, got -1"),
    ({"hidden": 0}, "workspace_bytes: hidden: expected at least 1, got 0"),
    ({"expert_width": 0}, "workspace_bytes: expert_width: expected at least 1, got 0"),
    ({"top_k": 0}, "workspace_bytes: top_k: expected at least 1, got 0"),
    ({"row_capacity": -2}, "workspace_bytes: row_capacity: expected -1 or at least 0, got -2"),
    ({"num_experts": 0}, "expert_range: num_experts: expected at least 1, got 0"),
    ({"rank": 2, "ranks": 2}, "expert_range: rank: expected 0 <= rank < 2, got 2"),
    ({"activation": "elu"}, "activation: expected one of swiglu, .*, got 'elu'"),
]


@pytest.mark.parametrize(("change", "message"), MESSAGES, ids=lambda v: v if isinstance(v, str) else "")
def test_figures_out_of_range(change: dict[str, Any], message: str) -> None:
    figures: dict[str, Any] = {"tokens": T, "hidden": H, "expert_width": I, "num_experts": E, "top_k": K}
    pattern = message if ".*" in message else f"^{re.escape(message)}$"
    with pytest.raises(ValueError, match=pattern):
        workspace_bytes(**{**figures, **change})
