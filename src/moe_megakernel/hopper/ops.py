"""Schemas of the ops that launch the fused kernels: `moe::hopper_forward` and `moe::hopper_workspace_bytes`.

Imported by `inner_ops` before the library with the CUDA kernels is loaded, which registers their implementations
(`kernels/bindings/forward.cpp`). They are called by `hopper.forward` and by tests, not by users: all outputs are given,
and nothing differentiates them.

* h of no rows is not kept. status: pinned int64 [16], the StepStatus of `kernels/include/moe/forward/status.h`.
* workspace: uint8, at least `hopper_workspace_bytes` long, zeroed when it was allocated, used by one stream only.
* log: int64, the number of records and then LogRecords of five words each (`plan/log.h`), or None.
* activation: a value of `ACTIVATION_NUMBERS`. num_sms: even; at most so many blocks run.
* skip_counter, skip_index: a raise that is left out, for tests of the timeout; -1 for none.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
)
for _schema in SCHEMAS:
    lib.define(_schema)


def _hopper_forward(*_: Tensor | int | float | None) -> None:
    """Every result is an argument."""


torch.library.register_fake("moe::hopper_forward", _hopper_forward, lib=lib)
