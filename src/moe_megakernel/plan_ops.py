"""Schemas and fake kernels of the ops that plan: `moe::merge_rows`, `plan_tables`, `plan_layout`, `plan_edges`, and
`device_plan`.

Imported by `inner_ops` before the native library is loaded, which registers their CPU kernels
(`kernels/bindings/rows.cpp`, `plan.cpp`). There is no other kernel: `distributed.exchange` has a twin of `merge_rows`
in PyTorch, and `plan` says in words that it needs the library. `device_plan` has a CUDA kernel alone
(`kernels/bindings/route_cuda.cpp`): the forward's plan as a device builds it, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .plan_names import Region
from .reference.route import TOKEN_CLASSES
from .schemas import lib

#: Fields of the config tensor, of an edge, and of a record (see `plan.PlanTables`).
NUM_CONFIG_FIELDS = 24
NUM_EDGE_FIELDS = 10
NUM_RECORD_FIELDS = 7

SCHEMAS = (
    "merge_rows(Tensor class_counts, Tensor token_starts, int rank) "
    "-> (Tensor expert_offsets, Tensor sources, Tensor send, Tensor receive)",
    "plan_tables(Tensor class_counts, Tensor tokens, Tensor config, int direction, int needs) "
    "-> (Tensor expert_offsets, Tensor tiles, Tensor segments, Tensor minibatch_ends, Tensor expert_tiles, "
    "Tensor expert_pieces, Tensor tasks, Tensor pulls, Tensor waits, Tensor raises, Tensor ring_minimum)",
    "device_plan(Tensor class_counts, Tensor tokens, Tensor config, int needs=-1) "
    "-> (Tensor expert_offsets, Tensor sources, Tensor tiles, Tensor segments, Tensor minibatch_ends, "
    "Tensor expert_tiles, Tensor expert_pieces, Tensor tasks)",
    "plan_layout(Tensor config, int element) -> Tensor",
    "plan_edges(Tensor like) -> Tensor",
)

for _schema in SCHEMAS:
    lib.define(_schema)


def _unknown() -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


def _merge_rows(class_counts: Tensor, token_starts: Tensor, rank: int) -> tuple[Tensor, ...]:
    ranks, num_experts, classes = class_counts.shape
    torch._check(classes == TOKEN_CLASSES)
    local = num_experts // ranks + (1 if rank < num_experts % ranks else 0)
    new = token_starts.new_empty
    return new(local + 1), class_counts.new_empty(_unknown(), 2), new(ranks), new(ranks)


def _plan_tables(
    class_counts: Tensor, tokens: Tensor, config: Tensor, direction: int, needs: int
) -> tuple[Tensor, ...]:
    new = tokens.new_empty
    experts = _unknown()  # the rank, which gives L, is a value in config
    return (
        new(experts),
        new(_unknown(), 3),
        new(_unknown(), 4),
        new(_unknown()),
        new(experts),
        new(experts),
        new(_unknown(), 5),
        new(_unknown(), 4),
        new(_unknown(), NUM_RECORD_FIELDS),
        new(_unknown(), NUM_RECORD_FIELDS),
        new(2),
    )


def _device_plan(class_counts: Tensor, tokens: Tensor, config: Tensor, needs: int = -1) -> tuple[Tensor, ...]:
    new = config.new_empty
    experts = _unknown()
    return (
        new(experts),
        new(_unknown(), 2),
        new(_unknown(), 3),
        new(_unknown(), 4),
        new(_unknown()),
        new(experts),
        new(experts),
        new(_unknown(), 5),
    )


def _plan_layout(config: Tensor, element: int) -> Tensor:
    return config.new_empty(len(Region), 3)


def _plan_edges(like: Tensor) -> Tensor:
    return like.new_empty(_unknown(), NUM_EDGE_FIELDS, dtype=torch.int64)


_FAKES: dict[str, Callable[..., Any]] = {
    "merge_rows": _merge_rows,
    "plan_tables": _plan_tables,
    "device_plan": _device_plan,
    "plan_layout": _plan_layout,
    "plan_edges": _plan_edges,
}
for _name, _function in _FAKES.items():
    torch.library.register_fake(f"moe::{_name}", _function, lib=lib)
