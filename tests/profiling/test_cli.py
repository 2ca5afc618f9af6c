"""`moe-megakernel profile`: what it prints and writes, the example of the docs, which files and options it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.profiling.handmade import Trace, training_step
from typer.testing import CliRunner, Result

from moe_megakernel.cli.main import app
from moe_megakernel.profiling import analyse_files
from moe_megakernel.profiling.picture import MOST_ROWS, write_picture

DOCS = Path(__file__).parents[2] / "docs" / "profile.md"


def profile(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result


def test_prints_the_example_of_the_docs(two_ranks):
    printed = [line.rstrip() for line in profile(*two_ranks).stdout.splitlines()]
    shown = [line.removeprefix("    ").rstrip() for line in DOCS.read_text().splitlines()]
    start = shown.index(printed[0])
    assert shown[start : start + len(printed)] == printed


def test_json(two_ranks, tmp_path):
    result = profile(tmp_path, "--json")
    report = json.loads(result.stdout)
    assert report["schema"] == 1
    assert [row["rank"] for row in report["rows"]] == [0, 1]
    assert report["rows"][0]["exposed_communication_ms"] == pytest.approx(0.2)
    assert report == json.loads(json.dumps(analyse_files(two_ranks).to_json()))
    assert result.stderr == "", "no progress bar without a terminal"


def test_png(two_ranks, tmp_path):
    profile(*two_ranks, "--png", tmp_path / "time.png", "--json")
    png = (tmp_path / "time.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 10_000


def test_picture_of_many_rows_and_of_hardly_any_time(tmp_path):
    trace = Trace()
    for device in range(MOST_ROWS + 3):
        trace.kernel("gemm", 0, 0.001, device=device)
    trace.kernel("nccl", 5, 10, device=MOST_ROWS + 2)
    report = analyse_files([trace.write(tmp_path / "trace.json")])
    write_picture(report, tmp_path / "time.png")
    assert (tmp_path / "time.png").stat().st_size > 10_000


def test_rules_of_users(two_ranks, tmp_path):
    rules = tmp_path / "mine.txt"
    rules.write_text(json.dumps({"rules": [{"name": "SendRecv", "class": "other", "moe": "none"}]}))
    report = json.loads(profile(two_ranks[0], "--rules", rules, "--json").stdout)
    assert report["rows"][0]["exposed_communication_ms"] == 0
    assert report["rows"][0]["moe"]["combine"]["time_ms"] == pytest.approx(0.04)


def test_rows_that_only_their_files_tell_apart(tmp_path):
    for name in ("a.json", "b.json"):
        training_step(rank=1).write(tmp_path / name)
    trace = Trace(rank=4)
    for device in (0, 1):
        trace.kernel("gemm", 0, 100, device=device)
    trace.write(tmp_path / "c.json")
    out = CliRunner().invoke(app, ["profile", str(tmp_path)], env={"COLUMNS": "300"}).stdout
    for label in (f"1 ({tmp_path / 'a.json'})", f"1 ({tmp_path / 'b.json'})", "4 gpu 0", "4 gpu 1"):
        assert label in out


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("none.json", None, 2, "expected a trace file, got no such file"),
        (
            "empty.json",
            "",
            1,
            "expected a trace of torch.profiler (an object with traceEvents, or a list of events), got an",
        ),
        ("cut.json", json.dumps(training_step().document())[:-9], 1, "expected a whole trace, got one that is cut off"),
        ("package.json", '{"name": "x", "version": "1"}', 1, "expected a trace of torch.profiler (an object with"),
        ("numbers.json", "[1, 2, 3]", 1, "expected a list of trace events, got a number as element 0"),
        ("folder", "", 2, "expected a folder with *.json or *.json.gz, got none in it"),
    ],
)
def test_refuses_files(tmp_path, name, content, code, message):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    result = profile(path, code=code)
    assert result.stderr.startswith(f"profile: {path}: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_refuses_options(two_ranks, tmp_path):
    result = profile(two_ranks[0], "--png", "/nowhere/a.png", code=2)
    assert result.stderr == "profile: --png: expected a file in a folder that exists, got /nowhere/a.png\n"
    result = profile(two_ranks[0], "--rules", tmp_path / "none", code=2)
    assert result.stderr == f"profile: {tmp_path / 'none'}: expected a file of rules, got No such file or directory\n"
    profile(code=2)


def test_importing_the_package_imports_no_rich_and_no_matplotlib():
    code = (
        "import moe_megakernel, sys; print([name for name in ('rich', 'matplotlib', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
