"""Memory follows the events that are kept, not the size of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What traces consist of besides kernels: stacks of Python functions and flow arrows.
NOISE = """{"ph": "X", "cat": "python_function", "name": "%s(%d): forward", "pid": 1, "tid": 1, "ts": %d.5, "dur": 3.25,
 "args": {"Python parent id": 17, "Python id": 18, "Ev Idx": 19, "Call stack": "a;b;c;d;e;f;g"}},
{"ph": "f", "id": 7, "pid": 0, "tid": 7, "ts": 5.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
"""
KERNEL = (
    '{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": %d, "dur": 1, "args": {"stream": 7}},\n'
)
MEASURE = """
import resource, sys
from moe_megakernel.profiling import analyse_files
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = analyse_files([sys.argv[1]])
assert report.rows[0].classes["gemm"].count == int(sys.argv[2]), report
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


def write(path: Path, megabytes: int) -> int:
    """A trace of about that size, of which a tenth of the events are kernels; returns their number."""
    kernels = size = 0
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        while size < megabytes << 20:
            block = "".join(NOISE % ("module", i, size + i) for i in range(5)) + KERNEL % (2 * kernels)
            size += file.write(block)
            kernels += 1
        file.write('{"ph": "M"}]}')
    return kernels


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux")
def test_memory_is_bounded(tmp_path):
    path = tmp_path / "trace.json"
    kernels = write(path, 60)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, path, str(kernels)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40 * 1024, "kB above an idle process, for a file of 60 MB"
