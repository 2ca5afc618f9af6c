"""Loads the C++ libraries, which register the kernels of ``torch.ops.moe`` that are not written in Python.

There are two: one for CPU tensors, and one with the CUDA kernels, which only a torch with CUDA can load. Owns the
search for the files and the answer to "is it loaded, and if not, why". ``inner_ops`` calls :func:`load` and
:func:`load_cuda` after the schemas are defined, and registers a kernel in Python where the answer is no; ``backends``,
``doctor`` and the tests ask the rest. Nothing here raises because a library is missing, and nothing initialises CUDA.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

#: Environment variables that name the library files. Where one is set, nothing else is searched.
LIBRARY_VARIABLE = "MOE_MEGAKERNEL_LIBRARY"
CUDA_LIBRARY_VARIABLE = "MOE_MEGAKERNEL_CUDA_LIBRARY"


class NativeLibrary:
    """One library file, and what became of loading it.

    Attributes:
        path: the file that was loaded, or None.
        reason: why it is not loaded, in words, or None where it is.
    """

    def __init__(self, file_name: str, variable: str) -> None:
        self.file_name = file_name
        self.variable = variable
        self.path: Path | None = None
        self.reason: str | None = "not loaded yet"
        self._tried = False
        self._lock = threading.Lock()

    def load(self, beside: Path | None = None, obstacle: str = "") -> bool:
        """Load the library if that has not been tried, and say whether it is loaded.

        Args:
            beside: another library, whose folder is searched first.
            obstacle: why it must not be loaded in this process, or "".
        """
        with self._lock:
            if not self._tried:
                self._tried = True
                self.reason = obstacle or self._load(list(self._candidates(beside)))
            return self.path is not None

    def _load(self, candidates: list[Path]) -> str | None:
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            return "no such file: " + ", ".join(str(candidate) for candidate in candidates)
        try:
            torch.ops.load_library(str(path))
        except Exception as error:  # OSError from the dynamic loader; a RuntimeError where a registration is refused
            return f"{path} does not load: {error}"
        self.path = path
        return None

    def _candidates(self, beside: Path | None) -> Iterator[Path]:
        """Yield the places of the library, best first."""
        named = os.environ.get(self.variable)
        if named is not None:
            yield Path(named)
            return
        if beside is not None:
            yield beside.with_name(self.file_name)
        # An editable install has two package folders: the sources, and the one in site-packages with the built library.
        for folder in sys.modules[__package__].__path__:
            yield Path(folder) / self.file_name
        root = Path(__file__).resolve().parents[2]
        if (root / "CMakeLists.txt").is_file():
            yield root / "build" / self.file_name


_cpu = NativeLibrary("libmoe_megakernel.so", LIBRARY_VARIABLE)
_cuda = NativeLibrary("libmoe_megakernel_cuda.so", CUDA_LIBRARY_VARIABLE)


def load() -> bool:
    """Load the library for CPU tensors if that has not been tried, and say whether it is loaded.

    The answer is found once in a process, because other kernels are registered where it is no; further calls, from any
    thread, return it. A library that is absent or does not load is not an error here: the reason is kept for
    :func:`why_missing`.
    """
    return _cpu.load()


def load_cuda() -> bool:
    """Load the library with the CUDA kernels, as :func:`load`; a torch without CUDA cannot, and it is not tried."""
    return _cuda.load(_cpu.path, "" if torch.version.cuda is not None else "this torch is built without CUDA")


def why_missing() -> str | None:
    """Return why the library for CPU tensors is not loaded, in words, or None where it is loaded."""
    return _cpu.reason


def why_cuda_missing() -> str | None:
    """Return why the library with the CUDA kernels is not loaded, in words, or None where it is loaded."""
    return _cuda.reason


def library_path() -> Path | None:
    """Return the file of the library for CPU tensors that was loaded, or None."""
    return _cpu.path


def cuda_library_path() -> Path | None:
    """Return the file with the CUDA kernels that was loaded, or None."""
    return _cuda.path
