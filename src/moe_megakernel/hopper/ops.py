"""Schemas of the ops that launch the fused kernels: `moe::hopper_forward` and `hopper_backward`, and for each of them
how much memory it works in (`.._workspace_bytes`) and which plan it follows (`.._plan_config`).

Imported by `inner_ops` before the libraries are loaded that register their implementations: the one with the CUDA
kernels, and for the plan's configuration the one for CPU tensors (both from `kernels/bindings`).
They are called by `hopper.forward`, `hopper.backward` and tests, not by users: all outputs are given, and nothing
differentiates them.

* h of no rows is not kept. status: pinned int64 [16], the StepStatus of `kernels/include/moe/forward/status.h`.
* workspace: uint8, at least as long as the op says, its first bytes zeroed when it was allocated (`workspaces`), used
  by one stream only. Launches of both directions may share it.
* group: None: one rank. Or int64 [8] on the CPU, the PeerGroup of `kernels/include/moe/peer/memory.h`
  (`peer_memory.PeerMemory.numbers`): the rank is one of a group that shares memory. num_experts is then the whole
  group's, h and row_route have its row_capacity rows, workspace and status are the group's, and row_route packs home
  rank and route.
* `hopper_keep_context`, `hopper_forget_contexts`: what `contexts` keeps for `layer_forward_direct`. stream: a handle.
* `hopper_group_bytes`: int64 [2], bytes of shared memory and of workspace, both directions, on every rank; tokens is
  the group's max_tokens. `hopper_group_refuse`: a forward that this rank refuses, for the others to hear of it.
* log: int64, the number of records and then LogRecords of five words each (`plan/log.h`), or None.
* activation: a value of `ACTIVATION_NUMBERS`. num_sms: even; at most so many blocks run.
* `.._plan_config`: the fields of `plan.PlanConfig` as int64, what such a launch makes its plan for.
* skip_counter, skip_index: a raise that is left out, for tests of the timeout; -1 for none.

Of the backward: an output that is None is not computed. dw_* in bfloat16 are written; in float32 they are main
gradients and added to. dx, dbias_* bfloat16, dtopk_weights float32, all contiguous. h None: it is computed again from
x, w_gate_up and bias_gate_up inside the launch. Inputs that nothing reads may be None. A refused step,
expert_offsets[0] == -1, makes every output NaN, main gradients too; an expert without rows has a gradient of zeros.
width: I.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan_ops import NUM_CONFIG_FIELDS
from ..schemas import lib

#: `Activation` in `kernels/include/moe/forward/arguments.h`.
ACTIVATION_NUMBERS = {"swiglu": 0, "swiglu_oai": 1, "geglu_tanh": 2, "geglu_erf": 3, "relu2": 4}

_LAUNCH = (
    "int activation, float alpha, float limit, bool staged, int num_sms, int timeout_ns, int skip_counter, "
    "int skip_index"
)
_SIZES = "int tokens, int top_k, int num_experts, int hidden, int width, bool gated, bool staged, int num_sms"

SCHEMAS = (
    "hopper_forward(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, "
    "Tensor? bias_gate_up, Tensor? bias_down, Tensor(a!) y, Tensor(b!) h, Tensor(c!) expert_offsets, "
    "Tensor(d!) row_route, Tensor(e!) workspace, Tensor(f!) status, Tensor(g!)? log, Tensor? group, int num_experts, "
    f"{_LAUNCH}) -> ()",
    f"hopper_workspace_bytes({_SIZES}) -> int",
    "hopper_keep_context(Tensor workspace, Tensor status, int stream, int num_sms, int timeout_ns) -> ()",
    "hopper_forget_contexts() -> ()",
    "hopper_group_refuse(Tensor(a!) workspace, Tensor(b!) status, Tensor group, int timeout_ns) -> ()",
    f"hopper_group_bytes({_SIZES}, int num_ranks, int row_capacity) -> Tensor",
    f"hopper_plan_config({_SIZES}) -> Tensor",
    f"hopper_group_plan_config({_SIZES}, int num_ranks, int row_capacity, int rank, bool backward) -> Tensor",
    "hopper_backward(Tensor dy, Tensor? x, Tensor topk_idx, Tensor topk_weights, Tensor? w_gate_up, Tensor? w_down, "
    "Tensor? bias_gate_up, Tensor? bias_down, Tensor? h, Tensor expert_offsets, Tensor row_route, Tensor(a!)? dx, "
    "Tensor(b!)? dtopk_weights, Tensor(c!)? dw_gate_up, Tensor(d!)? dw_down, Tensor(e!)? dbias_gate_up, "
    "Tensor(f!)? dbias_down, Tensor(g!) workspace, Tensor(h!) status, Tensor(i!)? log, Tensor? group, "
    "int num_experts, int width, "
    f"{_LAUNCH}) -> ()",
    f"hopper_backward_workspace_bytes({_SIZES}) -> int",
    f"hopper_backward_plan_config({_SIZES}) -> Tensor",
)
for _schema in SCHEMAS:
    lib.define(_schema)


def _launch(*_: Tensor | int | float | None) -> None:
    """Every result is an argument."""


def _plan_config(*_: int) -> Tensor:
    return torch.empty(NUM_CONFIG_FIELDS, dtype=torch.int64)


for _direction, _config in (("forward", "hopper_plan_config"), ("backward", "hopper_backward_plan_config")):
    torch.library.register_fake(f"moe::hopper_{_direction}", _launch, lib=lib)
    torch.library.register_fake(f"moe::{_config}", _plan_config, lib=lib)
torch.library.register_fake("moe::hopper_group_plan_config", _plan_config, lib=lib)
