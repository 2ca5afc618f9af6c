"""The Python examples of README.md and docs/ run as they stand: each block in a namespace of its own.

A block whose first line is a comment with a file name is a script for `torchrun` and is run by it, in two processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r"# \w+\.py\n")


def _blocks() -> list[tuple[str, str]]:
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for i, block in enumerate(BLOCK.findall(page.read_text())):
            found.append((f"{page.name}-{i}", block))
    return found


BLOCKS = _blocks()
SCRIPTS = [(name, block) for name, block in BLOCKS if SCRIPT.match(block)]
HERE = [
    pytest.param(name, block, id=name, marks=pytest.mark.slow if "torch.compile(" in block else ())
    for name, block in BLOCKS
    if not SCRIPT.match(block)
]


def test_there_are_examples_of_both_kinds():
    assert len(HERE) >= 3
    assert SCRIPTS


@pytest.mark.parametrize(("name", "block"), HERE)
def test_example_runs(name, block):
    torch.manual_seed(0)
    exec(compile(block, name, "exec"), {"__name__": name})


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), SCRIPTS, ids=[name for name, _ in SCRIPTS])
def test_script_runs_under_torchrun(name, block, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":  # both processes are on this host: gloo need not resolve its name
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank}" in done.stdout for rank in (0, 1)), done.stdout
