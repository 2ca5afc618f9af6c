"""`moe-megakernel simulate`: what it prints and writes, and how it refuses options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_megakernel.cli.main import app

SMALL = ["simulate", "--shape", "qwen3-30b", "--ranks", "4", "--tokens", "64"]


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_prints_a_table() -> None:
    out = run(*SMALL, "--direction", "both")
    for word in ("Qwen3-30B-A3B", "layer time, ms", "exposed communication", "forward", "backward", "Together"):
        assert word in out


def test_prints_json_and_writes_files(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.out" for name in ("trace", "png", "memory-map")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    report = json.loads(run(*SMALL, "--hardware", "gb300", "--json", *written))
    assert report["hardware"] == "gb300"
    assert report["tokens"] == 64
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert all(path.stat().st_size > 1000 for path in files.values())


def test_compares_orders() -> None:
    report = json.loads(run(*SMALL, "--compare", "--json"))
    assert {one["order"] for one in report["compared"]} == {"separate", "unlagged", "lagged", "sm-split"}
    assert "separate stages" in run(*SMALL, "--compare")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gpt"], "simulate: shape: expected one of kimi-k2, glm-5.2, "),
        (["--hardware", "a100"], "simulate: hardware: expected one of h200, gb200, gb300, got 'a100'"),
        (["--ranks", "9"], "simulate: ranks: expected 1 to 8 GPUs of one H200 SXM domain, got 9"),
        (["--ranks", "0"], "simulate: ranks: expected 1 to 8 "),
        (["--tokens", "0"], "simulate: tokens: expected 1 to 1048576 tokens a rank, got 0"),
        (["--dtype", "fp4"], "simulate: dtype: expected one of bf16, fp8, got 'fp4'"),
        (["--direction", "up"], "simulate: direction: expected one of forward, backward, both, got 'up'"),
        (["--routing", "zipf"], "simulate: routing: expected uniform or zipf:S with S between 0 and 10, got 'zipf'"),
        (["--order", "naive"], "simulate: order: expected one of separate, unlagged, lagged, sm-split, got 'naive'"),
        (["--transport", "mail"], "simulate: transport: expected one of pull, push, got 'mail'"),
        (["--comm-sms", "3"], "simulate: comm-sms: expected an even number from 0 to 130, got 3"),
        (["--comm-sms", "132"], "simulate: comm-sms: expected an even number from 0 to 130, got 132"),
        (["--minibatch-rows", "100"], "simulate: minibatch-rows: expected 128 to "),
        (["--minibatch-rows", "200"], "simulate: minibatch-rows: expected a multiple of 128, got 200"),
        (["--png", "/nowhere/a.png"], "simulate: png: expected a file in a folder that exists, got /nowhere/a.png"),
        (["--compare", "--trace", "a.json"], "simulate: trace: expected no file with --compare, got a.json"),
    ],
)
def test_refuses_wrong_options(arguments: list[str], message: str) -> None:
    assert run("simulate", *arguments, code=2).startswith(message)
