"""Wrong options end before any process starts, with exit code 2 and one line that says what was expected."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from moe_megakernel.cli.main import app
from moe_megakernel.train import launch
from moe_megakernel.train.config import TrainConfig, check_config


def train(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", 0], "train: --ranks: expected at least 1, got 0"),
        (["--steps", 0], "train: --steps: expected at least 1, got 0"),
        (["--batch", -1], "train: --batch: expected at least 1, got -1"),
        (["--seq", 0], "train: --seq: expected at least 1, got 0"),
        (["--layers", 0], "train: --layers: expected at least 1, got 0"),
        (["--experts", 0], "train: --experts: expected at least 1, got 0"),
        (["--expert-width", 0], "train: --expert-width: expected at least 1, got 0"),
        (["--top-k", 0], "train: --top-k: expected at least 1, got 0"),
        (["--threads", 0], "train: --threads: expected at least 1, got 0"),
        (["--experts", 4, "--top-k", 5], "train: --top-k: expected at most --experts 4, got 5"),
        (["--hidden", 36, "--heads", 4], "train: --hidden: expected a multiple of 2 * --heads = 8"),
        (["--batch", 2, "--ranks", 3], "train: --batch: expected at least one sequence for each of --ranks 3, got 2"),
        (["--lr", 0], "train: --lr: expected a positive number, got 0.0"),
        (["--lr", "nan"], "train: --lr: expected a positive number, got nan"),
        (["--seed", -1], "train: --seed: expected a number in [0, 2147483648), got -1"),
        (["--checkpoint-every", -1], "train: --checkpoint-every: expected a number of steps"),
        (["--device", "tpu"], "train: --device: expected cpu or cuda, got tpu"),
        (["--dtype", "int8"], "train: --dtype: expected float32 or bfloat16 or float64, got int8"),
        (["--backend", "quick"], "train: --backend: expected"),
        (["--backend", "mega"], "train: --backend: expected"),
        (["--text", "/no/such/file"], "train: --text: expected files that exist, got /no/such/file"),
    ],
)
def test_wrong_option(tmp_path, arguments, message):
    result = train("--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_short_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    result = train("--text", path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == "train: --text: expected at least 1548 bytes for --seq 128, got 9 bytes\n"


def test_out_is_a_file(tmp_path):
    path = tmp_path / "out"
    path.write_text("")
    result = train("--out", path)
    assert result.exit_code == 2
    assert result.stderr == f"train: --out: expected a folder, got {path}\n"


def test_resume_without_checkpoint(tmp_path):
    result = train("--resume", "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"train: --resume: expected a checkpoint under {tmp_path}/checkpoints, got none\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 32}, "train: --hidden: expected 16 as in "),
        ({"steps": 9}, "train: --steps: expected 6 as in "),
        ({"lr": 0.5}, "train: --lr: expected 0.004 as in "),
        ({"text": ()}, "train: --text: expected the text that "),
    ],
)
def test_resume_of_another_run(tiny, finished, change, message):
    config = asdict(replace(tiny, out=str(finished(1)), resume=True, **change))
    result = train(*as_arguments(config))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message)


def test_resume_from_damaged_state(tiny, finished, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(finished(1), out)
    (out / "checkpoints" / "step-000006" / "state.json").write_text("{")
    result = train(*as_arguments(asdict(replace(tiny, out=str(out), resume=True))))
    assert result.exit_code == 1
    assert result.stderr.startswith("train: --resume: expected a checkpoint in ")


def as_arguments(config):
    arguments = []
    for name, value in config.items():
        flag = "--" + name.replace("_", "-")
        if name == "text":
            for path in value:
                arguments += [flag, path]
        elif name == "compile":
            arguments.append(flag if value else "--no-compile")
        elif name in ("resume", "profile"):
            arguments += [flag] * value
        else:
            arguments += [flag, str(value)]
    return arguments


def test_every_option_reaches_the_run(monkeypatch, words_file):
    seen = []
    monkeypatch.setattr(launch, "run", seen.append)
    wanted = TrainConfig(
        text=(str(words_file), "b", "c"),
        out="o",
        ranks=3,
        device="cuda",
        dtype="float64",
        backend="reference",
        compile=False,
        steps=4,
        batch=5,
        seq=6,
        layers=7,
        hidden=8,
        heads=9,
        experts=10,
        top_k=11,
        expert_width=12,
        lr=13.0,
        seed=14,
        checkpoint_every=15,
        resume=True,
        threads=16,
        profile=True,
    )
    assert train(*as_arguments(asdict(wanted))).exit_code == 0
    assert train(*as_arguments(asdict(replace(wanted, text=()))), "--text", words_file, "b", "c").exit_code == 0
    assert train().exit_code == 0
    assert seen == [wanted, wanted, TrainConfig()]


def test_config_travels_as_json():
    config = TrainConfig(text=("a", "b"), lr=0.1)
    assert TrainConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["lr"] == 0.1


def test_defaults_are_a_valid_run():
    check_config(TrainConfig())
