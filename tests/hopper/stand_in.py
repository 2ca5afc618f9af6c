"""A stand-in on the CPU for the launches of `hopper.forward` or `hopper.backward`, which notes what they are given."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_megakernel import config
from moe_megakernel.hopper import launch

Calls = list[dict[str, Any]]


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
