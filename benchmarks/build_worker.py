"""One build of the kernels in a process of its own, for `benchmarks.builds`: it runs what it is told to, and waits.

Both ends of the pipe are here: `serve` in the process, `Worker` for whoever started it.
"""

from __future__ import annotations

import hashlib
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

import moe_megakernel
from moe_megakernel._native import CUDA_LIBRARY_VARIABLE, LIBRARY_VARIABLE, library_path
from moe_megakernel.bench.implementation import Call
from moe_megakernel.bench.peers.ours import layer_of
from moe_megakernel.bench.problem import make_problem
from moe_megakernel.bench.routings import parse_routing
from moe_megakernel.bench.timing import Flush
from moe_megakernel.shapes import Shape

from .environment import variables
from .rank_steps import Step, free_memory, results_of, time_steps

#: The file by which a folder is a build, and that with the CUDA kernels.
LIBRARY, CUDA_LIBRARY = "libmoe_megakernel.so", "libmoe_megakernel_cuda.so"
#: Seconds for one answer; the first one includes the import of torch.
LIMIT = 120.0


class LayerRequest(NamedTuple):
    """What layer a process is to make. The other request is a word of `rank_steps.DIRECTIONS`: to time one."""

    shape: Shape
    routing: str
    backend: str
    device: str


def digest(tensors: list[Tensor]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


class _Layer:
    """A layer in training mode, and samples of it with cold caches."""

    def __init__(self, request: LayerRequest) -> None:
        problem = make_problem(request.shape, parse_routing(request.routing), device=request.device)
        function = layer_of(problem.topk_idx, problem.shape.num_experts, request.backend)
        self._calls: dict[str, Call] = {"forward": lambda: function(*problem.leaves)}
        step = Step(self._calls["forward"](), problem.leaves, problem.dy)
        self._calls["backward"] = step.gradients
        self._flush = Flush(request.device) if problem.x.is_cuda else None
        self.digest = digest(results_of(step))
        moe_megakernel.check_errors()

    def sample(self, direction: str) -> float:
        """Milliseconds."""
        call = self._calls[direction]
        if self._flush is not None:
            return time_steps(call, 1, self._flush, lambda: None)
        begin = perf_counter_ns()
        call()
        return (perf_counter_ns() - begin) / 1e6


def serve(pipe: Connection, library: str) -> None:
    """Answers requests until there are none: with a digest of y and all gradients, or with milliseconds."""
    layer = None
    try:
        if library_path() is None or not Path(library).samefile(library_path() or ""):
            raise RuntimeError(f"expected {library} to be loaded, got {library_path()}")
        while True:
            request: LayerRequest | str = pipe.recv()
            if isinstance(request, LayerRequest):
                layer = None
                free_memory(torch.device(request.device))
                layer = _Layer(request)
                pipe.send(layer.digest)
            else:
                assert layer is not None
                pipe.send(layer.sample(request))
    except EOFError:
        return
    except Exception as error:  # whatever it is, the other side must hear of it
        pipe.send(error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}"))


def library_variables(folder: Path) -> dict[str, str]:
    """By which a process loads the libraries of a folder and no others, whatever the environment names."""
    folder = folder.resolve()
    return {LIBRARY_VARIABLE: str(folder / LIBRARY), CUDA_LIBRARY_VARIABLE: str(folder / CUDA_LIBRARY)}


class Worker:
    """The process of one build. Use it in a with statement.

    Args:
        name: of the build, for messages.
        folder: where its libraries are.

    Raises:
        ValueError: there is no library in the folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        library = folder / LIBRARY
        if not library.is_file():
            raise ValueError(f"builds: {name}: expected a folder with {LIBRARY}, got {folder}")
        self.name = name
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, str(library)), daemon=True)
        with variables(library_variables(folder)):  # read when the process imports the package
            self._process.start()
        other.close()

    def ask(self, request: LayerRequest | str) -> Any:
        """The answer to a request.

        Raises:
            RuntimeError: the process failed, ended or does not answer.
        """
        try:
            self._pipe.send(request)
            answer = self._pipe.recv() if self._pipe.poll(LIMIT) else RuntimeError(f"no answer in {LIMIT:.0f} s")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            answer = RuntimeError("its process has ended")
        if isinstance(answer, RuntimeError):
            raise RuntimeError(f"builds: {self.name}: {answer}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(timeout=5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
