"""The C interface of row_mover.cu, and the commands that build it."""

from __future__ import annotations

import ctypes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / "build" / "benchmarks" / "librow_mover.so"
BUILD = (
    "cmake -B build -DMOE_BENCHMARKS=ON && cmake --build build --target row_mover, or mkdir -p build/benchmarks && "
    "nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler=-fPIC "
    "-Ikernels/include benchmarks/row_mover/row_mover.cu -o build/benchmarks/librow_mover.so"
)
#: Most warps of a block.
MAX_WARPS = 6
#: Most ranks; bytes at the begin of a rank's buffer that its flags may take.
MAX_RANKS, FLAG_BYTES = 32, 1024


class Params(ctypes.Structure):
    """RowMoverParams of row_mover.cu, which explains the fields."""

    _fields_ = (
        ("buffers", ctypes.c_void_p),
        ("x_offset", ctypes.c_int64),
        ("rows_offset", ctypes.c_int64),
        ("moves", ctypes.c_void_p),
        ("num_moves", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("control", ctypes.c_void_p),
        ("generation", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("ranks", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("moves_of_near_row", ctypes.c_int32),
        ("push", ctypes.c_int32),
    )


class Library:
    """The loaded library; its launches raise RuntimeError where CUDA refuses them."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise RuntimeError(f"row_mover: library: expected a file, got {path}; build it by {BUILD}")
        self._library = ctypes.CDLL(str(path))
        self._library.row_mover_move.argtypes = [
            ctypes.POINTER(Params),
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self._library.row_mover_meet.argtypes = [ctypes.POINTER(Params), ctypes.c_void_p]
        self._library.row_mover_error.argtypes = [ctypes.c_int]
        self._library.row_mover_error.restype = ctypes.c_char_p

    def move(self, params: Params, blocks: int, warps: int, stream: int) -> None:
        self._check("move", self._library.row_mover_move(ctypes.byref(params), blocks, warps, stream))

    def meet(self, params: Params, stream: int) -> None:
        self._check("meet", self._library.row_mover_meet(ctypes.byref(params), stream))

    def _check(self, name: str, error: int) -> None:
        if error:
            text = self._library.row_mover_error(error).decode()
            raise RuntimeError(f"row_mover: {name}: expected a launch, got CUDA error {error}: {text}")
