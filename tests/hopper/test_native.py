"""Which library file is loaded, when it is tried, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_megakernel import _native, backends
from moe_megakernel._native import NativeLibrary


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that the loader was given."""
    names: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", names.append)
    return names


def test_an_obstacle_is_the_reason_and_nothing_is_tried(loaded: list[str], tmp_path: Path) -> None:
    (tmp_path / "lib.so").touch()
    library = NativeLibrary("lib.so", "MOE_TEST_LIBRARY")
    assert not library.load(tmp_path / "other.so", "no CUDA here")
    assert not library.load(tmp_path / "other.so")  # decided once
    assert (library.path, library.reason, loaded) == (None, "no CUDA here", [])


def test_the_folder_of_the_other_library_comes_first(loaded: list[str], tmp_path: Path) -> None:
    (tmp_path / "lib.so").touch()
    library = NativeLibrary("lib.so", "MOE_TEST_LIBRARY")
    assert library.load(tmp_path / "other.so")
    assert library.load()
    assert (library.path, library.reason, loaded) == (tmp_path / "lib.so", None, [str(tmp_path / "lib.so")])


def test_the_variable_names_the_only_file(loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib.so").touch()
    monkeypatch.setenv("MOE_TEST_LIBRARY", str(tmp_path / "named.so"))
    library = NativeLibrary("lib.so", "MOE_TEST_LIBRARY")
    assert not library.load(tmp_path / "other.so")
    assert library.reason == f"no such file: {tmp_path / 'named.so'}"
    (tmp_path / "named.so").touch()
    assert NativeLibrary("lib.so", "MOE_TEST_LIBRARY").load()
    assert loaded == [str(tmp_path / "named.so")]


def test_a_file_that_does_not_load_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"no ELF file")
    library = NativeLibrary("lib.so", "MOE_TEST_LIBRARY")
    assert not library.load(tmp_path / "other.so")
    assert library.reason is not None
    assert library.reason.startswith(f"{tmp_path / 'lib.so'} does not load: ")


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_a_torch_without_cuda_does_not_load_the_kernels() -> None:
    assert not _native.load_cuda()
    assert _native.why_cuda_missing() == "this torch is built without CUDA"
    assert backends.built_capabilities() == ()


def test_kernels_are_there_when_their_library_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native._cuda, "path", None)
    assert backends.built_capabilities() == ()
    assert backends.select_backend("auto", "cuda", (9, 0)) == "reference"
    monkeypatch.setattr(_native._cuda, "path", Path("libmoe_megakernel_cuda.so"))
    assert backends.built_capabilities() == ((9, 0),)
    assert backends.select_backend("auto", "cuda", (9, 0)) == "mega"
    assert backends.select_backend("auto", "cuda", (10, 0)) == "reference"
