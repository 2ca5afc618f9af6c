"""The parent of a training run: checks the options, starts one process a rank, watches them, reports the first failure.

`cli/train.py` calls `run`. The parent never trains; it hosts the store through which the ranks find each other, so no
port is guessed. Each rank leads a process group of its own that is killed as a whole, and reads a pipe held by the
parent: when the parent goes, for whatever reason, the pipe closes and the ranks end themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from moe_megakernel.backends import available_backends
from moe_megakernel.distributed.device_sharing import sharing_environment, sms_of_a_rank

from . import checkpoint
from .config import ArgumentError, TrainConfig, TrainError, check_config, option
from .data import load_corpus

POLL_SECONDS = 0.05
# When one rank fails the others notice within moments; waiting for their notes tells cause from consequence.
GRACE_SECONDS = 2.0


def run(config: TrainConfig) -> None:
    """Trains to the end and returns when all ranks have finished.

    Raises:
        ArgumentError: an option cannot work, or contradicts the checkpoint to resume from.
        TrainError: a rank failed; all others have been ended.
    """
    begun = time.time()
    check_config(config)
    _check_device(config)
    corpus = load_corpus(config.text, config.seq)
    out = Path(config.out)
    if config.resume:
        _check_resume(config, corpus.sha256)
    else:
        _set_aside(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moe-train-") as scratch:
        _run_ranks(config, begun, Path(scratch))


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", "cpu, because torch finds no CUDA device", "cuda")
    capability = torch.cuda.get_device_capability() if config.device == "cuda" else None
    backends = {"auto": "", **available_backends(config.device, capability)}
    reason = backends.get(config.backend, "unknown")
    if reason:
        usable = ", ".join(name for name, against in backends.items() if not against)
        raise ArgumentError("--backend", f"one that can run here ({usable})", f"{config.backend}: {reason}")
    if config.device == "cuda":
        _check_room(config.ranks)


def _check_room(ranks: int) -> None:
    """Ranks that share a GPU need some of its SMs each."""
    devices = torch.cuda.device_count()
    sms = min(torch.cuda.get_device_properties(index).multi_processor_count for index in range(devices))
    if sms_of_a_rank(sms, ranks, devices) == 0:
        found = f"{devices} GPU{'s' * (devices > 1)} of {sms} SMs, two for each rank"
        raise ArgumentError("--ranks", f"at most {devices * (sms // 2)} on {found}", ranks)


def _check_resume(config: TrainConfig, sha256: str) -> None:
    folder = checkpoint.find_latest(config.out)
    if folder is None:
        raise ArgumentError("--resume", f"a checkpoint under {config.out}/checkpoints", "none")
    state = checkpoint.read_state(folder)
    for name, value in config.model_and_data().items():
        saved = state["config"].get(name)
        if saved != value:
            raise ArgumentError(option(name), f"{saved} as in {folder}", value)
    if state["text_sha256"] != sha256:
        raise ArgumentError("--text", f"the text that {folder} was trained on", "another one")


def _set_aside(out: Path) -> None:
    """Moves the checkpoints of an earlier run out of the way of a new one."""
    if checkpoint.find_latest(out) is not None:
        previous = out / "checkpoints.previous"
        shutil.rmtree(previous, ignore_errors=True)
        (out / "checkpoints").rename(previous)
        print(f"train: a new run starts; the checkpoints of the earlier one are kept in {previous}", flush=True)


def _run_ranks(config: TrainConfig, begun: float, scratch: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(minutes=5), wait_for_workers=False)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(config.ranks):
            workers.append(_start(config, begun, rank, store.port, scratch))
        _watch(workers, scratch)
    finally:
        for worker in workers:
            _end(worker)
        Console().show_cursor()  # rank 0 hid it for its bar and may not have come to showing it again


def _start(config: TrainConfig, begun: float, rank: int, port: int, scratch: Path) -> subprocess.Popen[bytes]:
    environment = _environment(config)
    with (scratch / f"stderr-{rank}").open("wb") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "moe_megakernel.train.worker"],
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    order = {"config": config.to_json(), "begun": begun, "rank": rank, "port": port, "scratch": str(scratch)}
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: _watch reports it
        worker.stdin.write(json.dumps(order).encode() + b"\n")
        worker.stdin.flush()
    return worker


def _environment(config: TrainConfig) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads)}
    if config.device == "cuda":
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        environment |= sharing_environment(config.ranks, torch.cuda.device_count())
    if sys.platform.startswith("linux"):  # the ranks are on one host: gloo need not resolve its name
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _watch(workers: list[subprocess.Popen[bytes]], scratch: Path) -> None:
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            break
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)
    raise TrainError(_explain([worker.poll() for worker in workers], scratch))


def _explain(codes: list[int | None], scratch: Path) -> str:
    """Names the rank that failed first: one that died without a note, else the one with the earliest note."""
    notes = {rank: _note(scratch, rank) for rank, code in enumerate(codes) if code}
    culprit = min(notes, key=lambda rank: notes[rank].get("time", 0.0))
    code, note = codes[culprit], notes[culprit]
    if note:
        reason = note["error"]
    elif code is not None and code < 0:
        reason = f"ended by signal {signal.Signals(-code).name}"
    else:
        reason = f"ended with exit code {code}"
    trace = note.get("trace") or (scratch / f"stderr-{culprit}").read_text(errors="replace")[-4000:]
    if note.get("expected"):
        trace = ""
    headline = f"train: rank {culprit} of {len(codes)} failed, all ranks were stopped: {reason}"
    return f"{trace.rstrip()}\n{headline}".lstrip()  # what matters last, where a terminal shows it


def _note(scratch: Path, rank: int) -> dict:
    try:
        return json.loads((scratch / f"failure-{rank}.json").read_text())
    except (OSError, ValueError):
        return {}


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Kills what is left of the rank's process group, compilers included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    if worker.stdin is not None:
        with contextlib.suppress(OSError):
            worker.stdin.close()
