"""Checkpoints: tensors in safetensors, everything else in JSON, nothing pickled, loadable with any number of ranks.

    checkpoints/step-000100/replicated.safetensors             written by rank 0
                            experts-00000-of-00002.safetensors  one per rank: its experts
                            state.json                          written last, by rank 0

Called by `loop.py` on every rank and, for `find_latest` and `read_state`, by `launch.py`. Keys are names of the
model's state dict under a prefix for what is stored: the tensor itself or one of AdamW's two moments. No random state
is stored: the only random choice after the start, the data, is a function of seed and step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .config import TrainError

FORMAT = 1
MODEL, MOMENTS = "model", ("exp_avg", "exp_avg_sq")
KEPT = 2


def folder_of(out: str | Path, step: int) -> Path:
    return Path(out) / "checkpoints" / f"step-{step:06d}"


def find_latest(out: str | Path) -> Path | None:
    """The finished checkpoint of the highest step under `out`, or None."""
    finished = list(_finished(Path(out) / "checkpoints"))
    return finished[-1] if finished else None


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        TrainError: it cannot be read or is of another format.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        found = state["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainError(f"train: --resume: expected a checkpoint in {folder}, got {error!r}") from error
    if found != FORMAT:
        raise TrainError(f"train: --resume: expected checkpoint format {FORMAT}, got {found!r} in {folder}")
    return state


def save(
    folder: Path,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    expert_names: set[str],
    experts: list[range],
    rank: int,
    barrier: Callable[[], None],
) -> None:
    """Writes this rank's part of a checkpoint; collective, returns when the checkpoint is complete on all ranks.

    Args:
        state: what goes into state.json beside the layout; must be JSON.
        expert_names: parameters that are sharded over ranks in dimension 0.
        experts: the global expert ids that each rank holds, by rank.
        barrier: waits for all ranks.
    """
    partial = folder.with_name(folder.name + ".partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    tensors = _collect(model, optimizer)
    sharded = {key: t for key, t in tensors.items() if key.split("/", 1)[1] in expert_names}
    save_file(sharded, partial / _shard_name(rank, len(experts)))
    if rank == 0:
        save_file({key: t for key, t in tensors.items() if key not in sharded}, partial / "replicated.safetensors")
    barrier()
    if rank == 0:
        layout = {"format": FORMAT, "experts_by_rank": [[r.start, r.stop] for r in experts]}
        (partial / "state.json").write_text(json.dumps({**layout, **state}))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
        for old in list(_finished(folder.parent))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    barrier()


def load(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, expert_names: set[str], experts: range
) -> dict[str, Any]:
    """Loads parameters and AdamW's state in place and returns the JSON state; this rank holds `experts`.

    Raises:
        TrainError: a file is missing or damaged, or names and shapes are not exactly those of the model.
    """
    state = read_state(folder)
    try:
        saved = _read_tensors(folder, state, experts)
    except Exception as error:  # safetensors raises its own type, OSError, or both in disguise
        raise TrainError(f"train: --resume: expected a checkpoint in {folder}, got {error}") from error
    parameters = dict(model.named_parameters())
    wanted = {f"{MODEL}/{name}": t.shape for name, t in model.state_dict().items()}
    wanted |= {f"{kind}/{name}": p.shape for name, p in parameters.items() for kind in MOMENTS}
    got = {key: t.shape for key, t in saved.items()}
    if wanted != got:
        differing = sorted(key for key in wanted.keys() | got.keys() if wanted.get(key) != got.get(key))
        raise TrainError(f"train: --resume: expected the model's tensors in {folder}, got others at: {differing}")
    model.load_state_dict({name: saved[f"{MODEL}/{name}"] for name in model.state_dict()})
    name_of = {parameter: name for name, parameter in parameters.items()}
    skeleton = optimizer.state_dict()
    moments = {}
    for group, indexed in zip(optimizer.param_groups, skeleton["param_groups"], strict=True):
        for parameter, index in zip(group["params"], indexed["params"], strict=True):
            moments[index] = {kind: saved[f"{kind}/{name_of[parameter]}"] for kind in MOMENTS}
            moments[index]["step"] = torch.tensor(float(state["step"]))
    optimizer.load_state_dict({"state": moments, "param_groups": skeleton["param_groups"]})
    return state


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"{MODEL}/{name}": t.detach().contiguous() for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter, {})  # nothing for the empty shard of a rank without experts
        for kind in MOMENTS:
            tensors[f"{kind}/{name}"] = moments.get(kind, torch.zeros_like(parameter)).detach().contiguous()
    return tensors


def _read_tensors(folder: Path, state: Mapping[str, Any], experts: range) -> dict[str, Tensor]:
    with safe_open(folder / "replicated.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    shards = state["experts_by_rank"]
    parts: dict[str, list[Tensor]] = {}
    for rank, (start, stop) in enumerate(shards):
        first, last = max(start, experts.start), min(stop, experts.stop)
        with safe_open(folder / _shard_name(rank, len(shards)), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_tensor(key)
                parts.setdefault(key, []).append(part[max(0, first - start) : max(0, last - start)])
    return tensors | {key: torch.cat(pieces) for key, pieces in parts.items()}


def _shard_name(rank: int, ranks: int) -> str:
    return f"experts-{rank:05d}-of-{ranks:05d}.safetensors"


def _finished(checkpoints: Path) -> Iterator[Path]:
    if checkpoints.is_dir():
        folders = [f for f in checkpoints.iterdir() if re.fullmatch(r"step-\d{6,}", f.name)]
        for folder in sorted(folders, key=lambda f: int(f.name.removeprefix("step-"))):
            if (folder / "state.json").is_file():
                yield folder
