"""Stand-ins on the CPU for the launches of `hopper.forward` and `hopper.backward`.

`note_launches` notes what they are given; `launch_by_reference` gives it to the reference backend, with the same
contract: routes sorted by `moe::route`, outputs written where the caller wants them.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_megakernel import config
from moe_megakernel.activations import Activation
from moe_megakernel.hopper import backward, forward, launch
from moe_megakernel.hopper.ops import ACTIVATION_NUMBERS
from moe_megakernel.reference import layer
from moe_megakernel.reference.experts import Needs, Weights

Calls = list[dict[str, Any]]
#: Outputs of `moe::hopper_backward` in the order of `Needs`.
GRADIENTS = ("dx", "dtopk_weights", "dw_gate_up", "dw_down", "dbias_gate_up", "dbias_down")


def note_launches(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Calls:
    """Arguments of every launch of the module from now on, by name. 132 SMs, a timeout of 2.5 s."""
    names = [argument.name for argument in module._launch._schema.arguments]
    calls: Calls = []
    monkeypatch.setattr(module, "_launch", lambda *a: calls.append(dict(zip(names, a, strict=True))))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "device_sms", lambda index: 132)
    monkeypatch.setattr(module, "workspace_bytes", lambda *a: 1000 + a[0])
    monkeypatch.setattr(module, "get_workspace", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(module, "status_record", lambda device: SimpleNamespace(tensor=torch.zeros(16).long()))
    monkeypatch.setattr(config, "_num_sms", None)
    monkeypatch.setattr(config, "_timeout", 2.5)
    return calls


def launch_by_reference(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every launch from now on is computed by the reference, and noted, forward and backward in one list."""
    calls: Calls = []
    for module, run in ((forward, _forward), (backward, _backward)):
        names = [argument.name for argument in module._launch._schema.arguments]
        note_launches(monkeypatch, module)

        def replay(*args: Any, names: list[str] = names, run: Any = run) -> None:
            given = dict(zip(names, args, strict=True))
            calls.append(given)
            run(given)

        monkeypatch.setattr(module, "_launch", replay)
    return calls


def _activation(given: dict[str, Any]) -> Activation:
    (name,) = (name for name, number in ACTIVATION_NUMBERS.items() if number == given["activation"])
    return Activation(name, name != "relu2", given["alpha"], given["limit"])


def _weights(given: dict[str, Any]) -> Weights:
    return Weights(given["w_gate_up"], given["w_down"], given["bias_gate_up"], given["bias_down"])


def _forward(given: dict[str, Any]) -> None:
    keeps_h = given["h"].shape[0] > 0
    call = (given["x"], given["topk_idx"], given["topk_weights"], _weights(given), given["num_experts"])
    y, h, expert_offsets, row_route = layer.layer_forward(*call, _activation(given), keeps_h)
    assert given["h"].is_contiguous()
    for name, value in {"y": y, "h": h, "expert_offsets": expert_offsets, "row_route": row_route}.items():
        assert given[name].shape == value.shape, name
        given[name].copy_(value)


def _backward(given: dict[str, Any]) -> None:
    topk_idx, num_experts = given["topk_idx"], given["expert_offsets"].shape[0] - 1
    row_route, class_counts, _ = torch.ops.moe.route(topk_idx, num_experts)
    assert torch.equal(given["row_route"], row_route), "the plan is built from topk_idx, the rows lie by row_route"
    assert torch.equal(given["expert_offsets"], layer.offsets_from_counts(class_counts))
    needs = Needs(*(given[name] is not None for name in GRADIENTS))
    gate_up, down = (g if g is not None and g.dtype == torch.float32 else None for g in map(given.get, GRADIENTS[2:4]))
    recompute = given["h"] is None
    h = given["dy"].new_empty(0, given["w_gate_up"].shape[1]) if recompute else given["h"]
    assert recompute or h.shape[0] == topk_idx.numel()
    rows = (given["expert_offsets"], row_route)
    dx, dtopk_weights, grads = layer.layer_backward(
        given["dy"],
        given["x"],
        given["topk_weights"],
        _weights(given),
        h,
        *rows,
        _activation(given),
        needs,
        recompute,
        (gate_up, down),
    )
    parameters = (grads.dw_gate_up, grads.dw_down, grads.dbias_gate_up, grads.dbias_down)
    for name, value in zip(GRADIENTS, (dx, dtopk_weights, *parameters), strict=True):
        if value is not None:
            given[name].copy_(value)
