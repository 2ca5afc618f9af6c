"""How long one task takes and what it moves: the cost model. Called by `stream` for every task of a rank's plan.

A task is a cluster's: two blocks, one tile each. It takes the longer of its products at the tensor cores' rate and its
DRAM traffic at the cluster's share of the bandwidth, plus filling and draining the pipeline. Constants of a GPU are in
`moe_megakernel.hardware`; those of the kernel stand here, each with its origin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_megakernel.hardware import Hardware
from moe_megakernel.plan import ROW_TILE, Tiling
from moe_megakernel.plan_names import TaskKind
from moe_megakernel.shapes import Shape

# Share of the main loop's rate that spare pulling warps cost while rows are pulled. Measured: 2-7 % of the whole layer
# on an H200 (2026-12-01), middle.
PULL_SLOWDOWN = 0.045

# Weights are read from DRAM once for all row tiles that follow each other, and again where the cache loses them. How
# often: 1 + kLost (bytes of an expert's weights / L2)^2. Fitted to the prototype's two DRAM counts on an H200
# (2026-12-01): 1.7 times at 25 MB an expert, 5 to 7.6 times at 88 MB.
WEIGHT_REREADS = 2.0

WEIGHT_GRADIENTS = (TaskKind.WGRAD_DOWN, TaskKind.WGRAD_GATE_UP)
BIAS_GRADIENTS = (TaskKind.BIAS_DOWN, TaskKind.BIAS_GATE_UP)
BIAS_COLUMNS = 256  # of one block's part of a bias gradient, `kBiasColumns` in `plan/tasks.h`

LAUNCH_GAP = 4e-6  # between two kernels of a stream, seconds; usual on H200 and on Grace hosts alike
ROUTE_TIME = 10e-6  # publish routes, wait for the peers', build the tables; target: 1.5 % of a layer
PUSH_SIGNAL = 1.43e-6  # a pushing rank tells one peer; published: 103 us for 71 peers on GB300 (18 us when pulling)


@dataclass(frozen=True)
class Costs:
    """Costs of one direction on one GPU, of which `clusters` clusters compute."""

    shape: Shape
    hardware: Hardware
    tiles: Tiling
    dtype: str
    clusters: int

    @property
    def element(self) -> float:
        """Bytes of an operand's element; 8-bit operands carry a scale for 32 elements."""
        return 2.0 if self.dtype == "bf16" else 1.0 + 1.0 / 32.0

    @property
    def row_bytes(self) -> float:
        """Bytes of a row on its way to its expert. It comes back in bf16."""
        return self.shape.hidden * self.element

    @property
    def fill(self) -> float:
        return self.hardware.tile_fill

    @property
    def drain(self) -> float:
        """Part of the drain for which the tensor cores stand still."""
        return 0.0 if self.hardware.drain_overlaps else self.hardware.tile_drain

    @property
    def visible(self) -> float:
        """From the end of a task until another SM sees its counters."""
        return self.hardware.flag_latency + (self.hardware.tile_drain if self.hardware.drain_overlaps else 0.0)

    def main_loops(
        self, kind: np.ndarray, paired: np.ndarray, expert_rows: np.ndarray, sharing: np.ndarray, beside: np.ndarray
    ) -> np.ndarray:
        """[tasks] seconds of the main loop.

        Args:
            kind: [tasks] task kinds.
            paired: [tasks] 1 where both blocks work on one row tile.
            expert_rows: [tasks] rows of the task's expert on this rank (weight gradients run over them).
            sharing: [tasks] row tiles that use the same weights close in time.
            beside: [tasks] tasks of the same kind and minibatch: they share the DRAM, wave by wave.
        """
        flops = self._flops(kind, expert_rows)
        dram = self._dram_bytes(kind, paired, expert_rows, sharing)
        rate = self.hardware.flops(self.dtype) / self.hardware.sms  # of one SM; both blocks of a cluster run at once
        wave = beside / np.ceil(beside / self.clusters)  # tasks that run at once
        bandwidth = self.hardware.hbm_bandwidth * self.hardware.hbm_achievable / wave
        return np.maximum(flops / rate, dram / bandwidth)

    def home_bytes(self, kind: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """[tasks] bytes of rows that go home, for `rows` [tasks] row-columns tiles' rows of both blocks together."""
        goes = (kind == TaskKind.DOWN) | (kind == TaskKind.GATE_UP_DGRAD)
        columns = min(self.tiles.hidden_columns, self.shape.hidden)
        return np.where(goes, rows * columns * 2.0, 0.0)

    def combine_seconds(self, tokens: int) -> float:
        """Gather and sum of K rows of every token: DRAM-bound."""
        rate = self.hardware.hbm_bandwidth * self.hardware.combine_achievable
        return tokens * (self.shape.top_k + 1) * self.shape.hidden * 2.0 / rate

    def activation_pass(self, rows: float) -> float:
        """Seconds of an activation that is not fused, over `rows` rows: it reads h and writes a."""
        per_row = (self._h_columns + self.shape.width) * 2.0
        rate = self.hardware.hbm_bandwidth * self.hardware.hbm_achievable
        return self.fill + self.hardware.tile_drain + self.hardware.flag_latency + rows * per_row / rate

    @property
    def _h_columns(self) -> int:
        return self.shape.width * (2 if self.shape.gated else 1)

    def _flops(self, kind: np.ndarray, expert_rows: np.ndarray) -> np.ndarray:
        """[tasks] operations of one block's tile."""
        t, s = self.tiles, self.shape
        gates = 2 if s.gated else 1
        of_kind = np.zeros(len(TaskKind))
        of_kind[TaskKind.GATE_UP] = ROW_TILE * gates * t.act_columns * s.hidden
        of_kind[TaskKind.DOWN] = ROW_TILE * t.hidden_columns * s.width
        of_kind[TaskKind.DOWN_DGRAD] = ROW_TILE * t.dgrad_columns * s.hidden
        of_kind[TaskKind.GATE_UP_DGRAD] = ROW_TILE * t.hidden_columns * self._h_columns
        wgrad = np.isin(kind, WEIGHT_GRADIENTS)
        return 2.0 * np.where(wgrad, t.wgrad_rows * t.wgrad_columns * expert_rows, of_kind[kind])

    def _dram_bytes(
        self, kind: np.ndarray, paired: np.ndarray, expert_rows: np.ndarray, sharing: np.ndarray
    ) -> np.ndarray:
        """[tasks] DRAM bytes of both blocks: weights shared by neighbours, and what is stored for later."""
        t, s = self.tiles, self.shape
        gates = 2 if s.gated else 1
        weight_columns = {  # weight elements under one column tile
            TaskKind.GATE_UP: gates * t.act_columns * s.hidden,
            TaskKind.DOWN: t.hidden_columns * s.width,
            TaskKind.DOWN_DGRAD: t.dgrad_columns * s.hidden,
            TaskKind.GATE_UP_DGRAD: t.hidden_columns * self._h_columns,
        }
        stored = {  # elements that one block stores, or reads back, in DRAM
            TaskKind.GATE_UP: ROW_TILE * gates * t.act_columns,  # h
            TaskKind.DOWN_DGRAD: 2 * ROW_TILE * gates * t.dgrad_columns + ROW_TILE * t.dgrad_columns,  # h, dh, s*a
        }
        weights, rows = np.zeros(len(TaskKind)), np.zeros(len(TaskKind))
        for name, elements in weight_columns.items():
            weights[name] = elements
        for name, elements in stored.items():
            rows[name] = elements
        expert_bytes = (self._h_columns + s.width) * s.hidden * self.element
        rereads = 1.0 + WEIGHT_REREADS * (expert_bytes / self.hardware.l2_bytes) ** 2
        readers = np.maximum(1.0, np.ceil(sharing / 2.0))  # clusters that use one weight tile
        reads = np.minimum(rereads, readers) / readers * np.where(paired == 1, 2.0, 1.0)
        bytes_ = weights[kind] * self.element * reads + 2.0 * rows[kind] * 2.0
        wgrad = np.isin(kind, WEIGHT_GRADIENTS)
        if wgrad.any():
            bytes_ = np.where(wgrad, self._wgrad_bytes(kind, expert_rows), bytes_)
        bias_bytes = 2.0 * BIAS_COLUMNS * expert_rows * 2.0  # of dy or dh, by both blocks
        bytes_ = np.where(np.isin(kind, BIAS_GRADIENTS), bias_bytes, bytes_)
        return bytes_

    def _wgrad_bytes(self, kind: np.ndarray, expert_rows: np.ndarray) -> np.ndarray:
        """[tasks] operands of an expert are read once and shared by its tiles; every tile is stored once, in bf16."""
        t, s = self.tiles, self.shape
        down = kind == TaskKind.WGRAD_DOWN
        height = np.where(down, s.hidden, self._h_columns)
        breadth = np.where(down, s.width, s.hidden)
        tasks = np.maximum(1.0, height * breadth / (2.0 * t.wgrad_rows * t.wgrad_columns))
        return expert_rows * (height + breadth) * self.element / tasks + 2.0 * t.wgrad_rows * t.wgrad_columns * 2.0
