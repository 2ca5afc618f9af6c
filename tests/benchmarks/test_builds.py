"""The comparison of builds, on CPUs: what is timed there is the reference."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import build_worker, builds, environment
from moe_megakernel import _native
from moe_megakernel.shapes import Shape

SMALL = Shape("small", "small", num_experts=5, hidden=64, width=32, top_k=2, tokens=61)


@pytest.fixture
def folder() -> Path:
    path = _native.library_path()
    if path is None:
        pytest.skip(f"needs the library: {_native.why_missing()}")
    return path.parent


def test_ratio() -> None:
    base = [1.0, 2.0, 4.0]
    assert builds.ratio_of(base, base) == (1.0, 1.0, 1.0)
    assert builds.ratio_of([1.0, 3.0, 16.0], base) == (1.5, 1.0, 4.0)  # three samples bound nothing
    # Of 25 the 8th and the 18th, whatever the outermost ones are.
    ratio = builds.ratio_of([float(i) for i in range(1, 26)], [1.0] * 25)
    assert ratio == (13.0, 8.0, 18.0)
    assert builds.ratio_of([-99.0, *map(float, range(2, 25)), 1e9], [1.0] * 25) == ratio


def test_text_says_where_bits_differ() -> None:
    found = builds.Found("A", "forward", "new", 1.25, builds.Ratio(0.98, 0.97, 0.99), True)
    assert builds.text(found).split() == "A forward new 1.250 ms, 0.980 of the first (0.970 to 0.990)".split()
    assert builds.text(found._replace(same_bits=False)).endswith(", OTHER BITS")


class _FakeWorker:
    def __init__(self, name: str, digest: str, ms: float) -> None:
        self.name, self._digest, self._ms = name, digest, ms

    def ask(self, request: build_worker.LayerRequest | str) -> Any:
        return self._digest if isinstance(request, build_worker.LayerRequest) else self._ms


def test_bits_and_ratios_are_those_of_the_first_build() -> None:
    workers: Any = [_FakeWorker("a", "x", 2.0), _FakeWorker("b", "x", 3.0), _FakeWorker("c", "y", 1.0)]
    found = builds.compare(workers, "S", SMALL, "uniform", "mega", 4, "cpu")
    assert [(f.build, f.ms, f.ratio.median, f.same_bits) for f in found[:3]] == [
        ("a", 2.0, 1.0, True),
        ("b", 3.0, 1.5, True),
        ("c", 1.0, 0.5, False),
    ]


def test_names() -> None:
    assert builds.named_folders(["a=x", "b=y/z"]) == [("a", Path("x")), ("b", Path("y/z"))]
    for bad in (["a=x"], ["a=x", "a=y"], ["a=x", "b"], ["a=x", "=y"], ["a=x", "b="]):
        with pytest.raises(typer.BadParameter, match="expected two or more NAME=FOLDER"):
            builds.named_folders(bad)


def test_libraries_are_those_of_the_folder(tmp_path: Path) -> None:
    assert build_worker.library_variables(tmp_path) == {
        "MOE_MEGAKERNEL_LIBRARY": str(tmp_path / "libmoe_megakernel.so"),
        "MOE_MEGAKERNEL_CUDA_LIBRARY": str(tmp_path / "libmoe_megakernel_cuda.so"),
    }


def test_variables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TEST_SET", "before")
    monkeypatch.delenv("MOE_TEST_UNSET", raising=False)
    before = dict(os.environ)
    inside = environment.variables({"MOE_TEST_SET": "a", "MOE_TEST_UNSET": "b"})
    inside.__enter__()
    assert (os.environ["MOE_TEST_SET"], os.environ["MOE_TEST_UNSET"]) == ("a", "b")
    assert not inside.__exit__(KeyError, KeyError(), None)  # an error passes
    assert dict(os.environ) == before


def test_two_builds_take_turns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in build_worker.library_variables(folder):  # a build must not be replaced by what is named here
        monkeypatch.setenv(name, str(tmp_path / "another.so"))
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(folder / build_worker.LIBRARY, copy)
    before = dict(os.environ)
    with build_worker.Worker("base", folder) as base, build_worker.Worker("copy", copy) as other:
        assert dict(os.environ) == before
        found = builds.compare([base, other], "S", SMALL, "uniform", "reference", 3, "cpu")
        with pytest.raises(RuntimeError, match=r"builds: copy: .*backend"):
            other.ask(build_worker.LayerRequest(SMALL, "uniform", "fastest", "cpu"))
        with pytest.raises(RuntimeError, match="builds: copy: its process has ended"):
            other.ask("forward")
    assert [(f.direction, f.build) for f in found] == [
        (direction, build) for direction in ("forward", "backward") for build in ("base", "copy")
    ]
    assert all(f.ms > 0 and f.same_bits for f in found)
    assert all(f.ratio == (1.0, 1.0, 1.0) for f in found if f.build == "base")


def test_a_folder_without_a_library(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"builds: new: expected a folder with libmoe_megakernel\.so, got "):
        build_worker.Worker("new", tmp_path)
