"""Checkpoints survive a round trip to the bit, also over another number of ranks, and bad ones are refused in words."""

import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe_megakernel import expert_range
from moe_megakernel.train import checkpoint
from moe_megakernel.train.config import TrainError

EXPERTS = 5
SHARDED = {"experts"}


class Toy(nn.Module):
    """One sharded and one replicated parameter, and a buffer that must be kept."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.held = expert_range(EXPERTS, rank, ranks)
        everyone = torch.arange(EXPERTS * 6, dtype=torch.float32).view(EXPERTS, 2, 3)
        self.experts = nn.Parameter(everyone[self.held.start : self.held.stop].clone())
        self.shared = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.tensor([0.5]))
        self.optimizer = torch.optim.AdamW([p for p in (self.experts, self.shared) if p.numel()], lr=0.1, fused=True)

    def steps(self, number: int) -> None:
        for _ in range(number):
            for parameter in (self.experts, self.shared):
                parameter.grad = parameter.detach().cos()
            self.optimizer.step()


def save_all(folder, toys, step=2):
    """Every rank in a thread of its own, as `save` is collective."""
    barrier = threading.Barrier(len(toys))
    experts = [toy.held for toy in toys]
    errors = []

    def save(rank):
        try:
            toy = toys[rank]
            state = {"step": step, "history": {"loss": [0.1]}}
            checkpoint.save(
                folder,
                state,
                toy,
                toy.optimizer,
                expert_names=SHARDED,
                experts=experts,
                rank=rank,
                barrier=barrier.wait,
            )
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(len(toys))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def make_saved(folder, ranks):
    toys = [Toy(rank, ranks) for rank in range(ranks)]
    for toy in toys:
        toy.steps(2)
    save_all(folder, toys)
    return toys


def everything(toys):
    """Tensors and AdamW's moments of all ranks, experts joined: what no split may change."""
    joined = {}
    for toy in toys:
        moments = toy.optimizer.state
        for kind in ("exp_avg", "exp_avg_sq"):
            joined[f"{kind}/shared"] = moments[toy.shared][kind]
        if toy.experts.numel():
            for kind in ("exp_avg", "exp_avg_sq"):
                joined.setdefault(kind, []).append(moments[toy.experts][kind])
        joined.setdefault("experts", []).append(toy.experts.detach())
        joined |= {"shared": toy.shared.detach(), "bias": toy.bias, "step": moments[toy.shared]["step"]}
    return {key: torch.cat(value) if isinstance(value, list) else value for key, value in joined.items()}


def load_all(folder, ranks):
    toys = [Toy(rank, ranks) for rank in range(ranks)]
    for toy in toys:
        toy.bias.zero_()
        state = checkpoint.load(folder, toy, toy.optimizer, SHARDED, toy.held)
        assert state["step"] == 2
        assert state["history"] == {"loss": [0.1]}
    return toys


@pytest.mark.parametrize("before", [1, 2, 3, 7])
@pytest.mark.parametrize("after", [1, 2, 7])
def test_round_trip_with_any_number_of_ranks(tmp_path, before, after):
    folder = checkpoint.folder_of(tmp_path, 2)
    expected = everything(make_saved(folder, before))
    got = everything(load_all(folder, after))
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("ranks", [1, 3])
def test_further_steps_are_those_of_an_unbroken_run(tmp_path, ranks):
    folder = checkpoint.folder_of(tmp_path, 2)
    unbroken, resumed = make_saved(folder, ranks), load_all(folder, ranks)
    for toy in (*unbroken, *resumed):
        toy.steps(2)
    expected, got = everything(unbroken), everything(resumed)
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def test_layout_is_safetensors_and_json(tmp_path):
    folder = checkpoint.folder_of(tmp_path, 2)
    make_saved(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == [
        "experts-00000-of-00002.safetensors",
        "experts-00001-of-00002.safetensors",
        "replicated.safetensors",
        "state.json",
    ]
    assert set(load_file(folder / "replicated.safetensors")) == {
        "model/shared",
        "model/bias",
        "exp_avg/shared",
        "exp_avg_sq/shared",
    }
    assert json.loads((folder / "state.json").read_text())["experts_by_rank"] == [[0, 3], [3, 5]]


def test_latest_is_by_number_and_only_two_are_kept(tmp_path):
    toy = Toy(0, 1)
    toy.steps(1)
    for step in (9, 10, 1_000_000):
        save_all(checkpoint.folder_of(tmp_path, step), [toy], step)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000010", "step-1000000"]
    assert checkpoint.find_latest(tmp_path).name == "step-1000000"


def test_unfinished_checkpoint_is_not_found(tmp_path):
    folder = checkpoint.folder_of(tmp_path, 2)
    make_saved(folder, 1)
    folder.rename(folder.with_name(folder.name + ".partial"))
    assert checkpoint.find_latest(tmp_path) is None
    assert checkpoint.find_latest(tmp_path / "nowhere") is None


def load_toy(folder):
    toy = Toy(0, 1)
    checkpoint.load(folder, toy, toy.optimizer, SHARDED, toy.held)


@pytest.mark.parametrize("change", ["missing", "surplus", "shape"])
def test_other_tensors_are_refused_by_name(tmp_path, change):
    folder = checkpoint.folder_of(tmp_path, 2)
    make_saved(folder, 1)
    path = folder / "replicated.safetensors"
    tensors = load_file(path)
    key = "exp_avg/shared"
    if change == "missing":
        del tensors[key]
    elif change == "surplus":
        key = "model/unknown"
        tensors[key] = torch.zeros(1)
    else:
        tensors[key] = torch.zeros(4)
    save_file(tensors, path)
    with pytest.raises(TrainError, match=rf"expected the model's tensors in .*, got others at: \['{key}'\]"):
        load_toy(folder)


@pytest.mark.parametrize("name", ["experts-00000-of-00001.safetensors", "replicated.safetensors"])
def test_damaged_or_missing_file_is_refused(tmp_path, name):
    folder = checkpoint.folder_of(tmp_path, 2)
    make_saved(folder, 1)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainError, match=r"train: --resume: expected a checkpoint in .*step-000002, got"):
        load_toy(folder)
    (folder / name).unlink()
    with pytest.raises(TrainError, match="expected a checkpoint in"):
        load_toy(folder)


@pytest.mark.parametrize(("text", "words"), [("{", "JSONDecodeError"), ("[]", "TypeError"), ('{"format": 2}', "got 2")])
def test_bad_state_is_refused(tmp_path, text, words):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(TrainError, match=words):
        checkpoint.read_state(tmp_path)
