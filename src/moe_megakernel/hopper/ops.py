"""Schemas of the ops that launch the fused kernels: `moe::hopper_forward`, `hopper_workspace_bytes` and
`hopper_plan_config`.

Imported by `inner_ops` before the libraries are loaded that register their implementations: the one with the CUDA
kernels (`kernels/bindings/forward.cpp`), and for `hopper_plan_config` the one for CPU tensors (`forward_config.cpp`).
They are called by `hopper.forward` and by tests, not by users: all outputs are given, and nothing differentiates them.

* h of no rows is not kept. status: pinned int64 [16], the StepStatus of `kernels/include/moe/forward/status.h`.
* workspace: uint8, at least `hopper_workspace_bytes` long, its first bytes zeroed when it was
  allocated (`workspaces`), used by one stream only.
* log: int64, the number of records and then LogRecords of five words each (`plan/log.h`), or None.
* activation: a value of `ACTIVATION_NUMBERS`. num_sms: even; at most so many blocks run.
* `hopper_plan_config`: the fields of `plan.PlanConfig` as int64, what such a launch makes its plan for.
* skip_counter, skip_index: a raise that is left out, for tests of the timeout; -1 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan_ops import NUM_CONFIG_FIELDS
from ..schemas import lib

#: `Activation` in `kernels/include/moe/forward/arguments.h`.
ACTIVATION_NUMBERS = {"swiglu": 0, "swiglu_oai": 1, "geglu_tanh": 2, "geglu_erf": 3, "relu2": 4}

SCHEMAS = (
    "hopper_forward(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor? bias_gate_up, Tensor? bias_down, Tensor(a!) y, Tensor(b!) h, Tensor(c!) expert_offsets, "
    "Tensor(d!) row_route, Tensor(e!) workspace, Tensor(f!) status, Tensor(g!)? log, int num_experts, int activation, "
    "float alpha, float limit, bool staged, int num_sms, int timeout_ns, int skip_counter, int skip_index) -> ()",
    "hopper_workspace_bytes(int tokens, int top_k, int num_experts, int hidden, int width, bool gated, bool staged, "
    "int num_sms) -> int",
    "hopper_plan_config(int tokens, int top_k, int num_experts, int hidden, int width, bool gated, bool staged, "
    "int num_sms) -> Tensor",
)
for _schema in SCHEMAS:
    lib.define(_schema)


def _hopper_forward(*_: Tensor | int | float | None) -> None:
    """Every result is an argument."""


def _hopper_plan_config(*_: int) -> Tensor:
    return torch.empty(NUM_CONFIG_FIELDS, dtype=torch.int64)


torch.library.register_fake("moe::hopper_forward", _hopper_forward, lib=lib)
torch.library.register_fake("moe::hopper_plan_config", _hopper_plan_config, lib=lib)
