"""Loads the C++ library, which registers the kernels of ``torch.ops.moe`` that are written in C++.

Owns the search for the file and the answer to "is it loaded, and if not, why". ``inner_ops`` calls :func:`load` after
the schemas are defined, and registers a kernel in Python where the answer is no; ``doctor`` and the tests ask the rest.
Nothing here raises because the library is missing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

#: Environment variable that names the library file. Where it is set, nothing else is searched.
LIBRARY_VARIABLE = "MOE_MEGAKERNEL_LIBRARY"

_FILE_NAME = "libmoe_megakernel.so"

_lock = threading.Lock()
_tried = False
_loaded_path: Path | None = None
_reason: str | None = "not loaded yet"


def load() -> bool:
    """Load the library if that has not been tried, and say whether it is loaded.

    The answer is found once in a process, because other kernels are registered where it is no; further calls, from any
    thread, return it. A library that is absent or does not load is not an error here: the reason is kept for
    :func:`why_missing`.
    """
    global _tried, _loaded_path, _reason
    with _lock:
        if _tried:
            return _loaded_path is not None
        _tried = True
        candidates = list(_candidates())
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            _reason = "no such file: " + ", ".join(str(candidate) for candidate in candidates)
            return False
        try:
            torch.ops.load_library(str(path))
        except Exception as error:  # OSError from the dynamic loader; a RuntimeError where a registration is refused
            _reason = f"{path} does not load: {error}"
            return False
        _loaded_path, _reason = path, None
        return True


def why_missing() -> str | None:
    """Return why the library is not loaded, in words, or None where it is loaded."""
    return _reason


def library_path() -> Path | None:
    """Return the file that was loaded, or None."""
    return _loaded_path


def _candidates() -> Iterator[Path]:
    """Yield the places of the library, best first."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named is not None:
        yield Path(named)
        return
    # An editable install has two package folders: the sources, and the one in site-packages with the built library.
    for folder in sys.modules[__package__].__path__:
        yield Path(folder) / _FILE_NAME
    root = Path(__file__).resolve().parents[2]
    if (root / "CMakeLists.txt").is_file():
        yield root / "build" / _FILE_NAME
