"""A small text and small runs for the tests of the trainer. Runs are real: processes, gloo, files."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_megakernel.train import launch, loop
from moe_megakernel.train.config import TrainConfig


@pytest.fixture(scope="session")
def words_file(tmp_path_factory) -> Path:
    """About 20 kB of made-up sentences, the same every time; no paragraph occurs twice."""
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioubdklmnrst", k=draw.randint(2, 8))) for _ in range(200)]
    paragraphs = [" ".join(draw.choices(words, k=30)).capitalize() + "." for _ in range(120)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(paragraphs))
    return path


@pytest.fixture(scope="session")
def tiny(words_file) -> TrainConfig:
    """A run of seconds; E is not divisible by two ranks, nor the batch by three."""
    return TrainConfig(
        text=(str(words_file),),
        ranks=1,
        compile=False,
        steps=6,
        batch=4,
        seq=32,
        layers=2,
        hidden=16,
        heads=2,
        experts=5,
        top_k=2,
        expert_width=8,
        checkpoint_every=3,
    )


@pytest.fixture(scope="session")
def run():
    """run(config): a whole run; a single rank runs in this process, which saves seconds, several as in earnest."""

    def run_here_or_there(config: TrainConfig) -> None:
        if config.ranks > 1:
            launch.run(config)
            return
        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        fill = torch.utils.deterministic.fill_uninitialized_memory
        try:
            loop.train(config, 0, None)
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
            torch.utils.deterministic.fill_uninitialized_memory = fill

    return run_here_or_there


@pytest.fixture(scope="session")
def finished(run, tiny, tmp_path_factory):
    """Runs of the tiny configuration by number of ranks, each made once: {ranks: folder}."""
    folders: dict[int, Path] = {}

    def by_ranks(ranks: int) -> Path:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp(f"run{ranks}")
            run(replace(tiny, ranks=ranks, out=str(folders[ranks])))
        return folders[ranks]

    return by_ranks


def history_of(out: Path, step: int) -> dict:
    return json.loads((out / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())["history"]


@pytest.fixture(scope="session", name="history_of")
def history_of_fixture():
    """history_of(out, step): the losses up to `step` as the checkpoint keeps them, exact to the last bit."""
    return history_of
