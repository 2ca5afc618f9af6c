"""Traces made by hand, in Kineto's form, whose figures can be told without a program.

`training_step` is the example of docs/profile.md; `python -m tests.profiling.handmade FOLDER` writes it for two ranks.
Times of the builder are microseconds.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any


class Trace:
    """Collects events; `document` and `write` give them Kineto's form.

    Args:
        rank: None leaves the trace without `distributedInfo`.
        origin: microseconds on the trace's clock that its own times count from.
    """

    def __init__(self, rank: int | None = None, world_size: int = 2, origin: float = 5_000_000_000.0) -> None:
        self.events: list[dict[str, Any]] = []
        self._rank, self._world_size, self._origin = rank, world_size, origin
        self._correlation = 100

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launch: tuple[float, float] | int | None = None,
        stream: int = 7,
        device: int = 0,
        kind: str = "kernel",
        thread: int = 1,
    ) -> int:
        """`launch`: start and end of the host call, or the number that this returned for a call shared, or None."""
        correlation = 0
        if isinstance(launch, int):
            correlation = launch
        elif launch is not None:
            self._correlation += 1
            correlation = self._correlation
            self._add("cuda_runtime", "cudaLaunchKernel", *launch, pid=1, tid=thread, correlation=correlation)
        args = {"device": device, "stream": stream, "correlation": correlation}
        self._add(kind, name, start, end, pid=device, tid=stream, **args)
        return correlation

    def op(
        self, name: str, start: float, end: float, thread: int = 1, sequence: int | None = None, forward_thread: int = 0
    ) -> None:
        """`sequence`: autograd's number of the op, or of the one whose gradient it is, run on `forward_thread`."""
        numbers = {} if sequence is None else {"Sequence number": sequence, "Fwd thread id": forward_thread}
        self._add("cpu_op", name, start, end, pid=1, tid=thread, **numbers)

    def range(self, name: str, start: float, end: float, thread: int = 1) -> None:
        self._add("user_annotation", name, start, end, pid=1, tid=thread)

    def _add(self, kind: str, name: str, start: float, end: float, pid: int, tid: int, **args: Any) -> None:
        ts = self._origin + start
        event = {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": end - start}
        self.events.append({**event, "args": args})

    def document(self) -> dict[str, Any]:
        head: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
        if self._rank is not None:
            head["distributedInfo"] = {"backend": "nccl", "rank": self._rank, "world_size": self._world_size}
        meta = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.0, "args": {"name": "python"}}
        arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 1, "tid": 1, "ts": 0.0, "id": 1}
        return {**head, "traceEvents": [meta, arrow, *self.events], "traceName": "made by hand"}

    def write(self, path: Path) -> Path:
        text = json.dumps(self.document())
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def training_step(rank: int = 0, dispatch: float = 150.0) -> Trace:
    """Two steps of a transformer block with an MoE layer whose all-to-alls are mostly exposed, and a warm-up before.

        compute |flash 100|gemm 100|gate 20|permute 30|shared 50|        |experts 200   |        |unpermute 40|copy 20|
        comm.                                         |dispatch 150      | all-reduce 60|comb 100|
        then    40 idle, the host was late | adam 50 | 10 idle, a wait | gemm 90 | 50 idle, the host again

    Args:
        rank: of the trace.
        dispatch: microseconds of the first all-to-all; 150 in the picture. At least 50.
    """
    trace = Trace(rank)
    trace.kernel("warm_up", 500, 900, launch=(490, 495))
    for step in range(2):
        _add_step(trace, step, 1000.0 + step * (850.0 + dispatch), dispatch)
    return trace


def _add_step(trace: Trace, step: int, base: float, dispatch: float) -> None:
    def run(name: str, start: float, length: float, launch: float, stream: int = 7, kind: str = "kernel") -> float:
        called = (base + launch, base + launch + 4)
        trace.kernel(name, base + start, base + start + length, launch=called, stream=stream, kind=kind)
        return start + length

    trace.range(f"ProfilerStep#{step + 3}", base - 20, base + 710 + dispatch)
    run("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)", 0, 100, -14)
    run("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", 100, 100, -9)
    trace.range("moe_layer", base, base + 100)
    run("void topkGatingSoftmax<bf16, 8>(float const*)", 200, 20, 2)
    run("_permute_kernel", 220, 30, 8)
    trace.range("moe.dispatch", base + 14, base + 30)
    trace.op("c10d::alltoall_base_", base + 15, base + 29)
    sent = run("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 250, dispatch, 20, stream=20)
    trace.range("shared_experts", base + 31, base + 38)
    run("nvjet_hsh_64x128_64x4_1x1_h_bz_NNT", 250, 50, 32)
    done = run("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>", sent, 200, 40)
    run("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", sent + 100, 60, 102, stream=24)
    trace.range("moe.combine", base + 50, base + 60)
    home = run("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", done, 100, 52, stream=20)
    copied = run("Memcpy DtoD (Device -> Device)", run("_unpermute_kernel", home, 40, 70), 20, 110, kind="gpu_memcpy")
    updated = run("void at::native::multi_tensor_apply_kernel<FusedAdam>(int)", copied + 40, 50, copied + 30)
    run("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", updated + 10, 90, updated - 20)


if __name__ == "__main__":
    for number, length in enumerate((150.0, 250.0)):
        training_step(number, length).write(Path(sys.argv[1]) / f"rank{number}.pt.trace.json")
