"""Two or more builds of the kernels against each other: `python -m benchmarks.builds base=/tmp/base new=build`.

One process cannot hold two builds, since both register the same ops. So each has a process of its own on the same GPU,
and they take turns sample by sample: what makes one run of a benchmark differ from the next by percents, clock rate,
heat and the GPU itself, is the same for both. Ratios are taken within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from math import floor, sqrt
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

from moe_megakernel.cli.words import some_of
from moe_megakernel.shapes import Shape, benchmark_shapes

from .build_worker import LayerRequest, Worker
from .group import require_gpu
from .rank_steps import DIRECTIONS


class Ratio(NamedTuple):
    """Time of a build over that of the first: the median over rounds, and an interval that holds it with 95 %."""

    median: float
    low: float
    high: float


class Found(NamedTuple):
    """One shape, direction and build: median milliseconds; ratio to the first build; whether all bits are its."""

    letter: str
    direction: str
    build: str
    ms: float
    ratio: Ratio
    same_bits: bool


def ratio_of(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """Of paired samples. The interval is that of order statistics: it asks nothing of how times are distributed."""
    ratios = sorted(t / b for t, b in zip(times, base, strict=True))
    margin = floor((len(ratios) - 1.96 * sqrt(len(ratios))) / 2)
    low = max(margin, 0)
    return Ratio(median(ratios), ratios[low], ratios[len(ratios) - 1 - low])


def compare(
    workers: Sequence[Worker], letter: str, shape: Shape, routing: str, backend: str, rounds: int, device: str
) -> list[Found]:
    """Every build once a round, beginning with another one each round, first forward, then backward.

    Raises:
        RuntimeError: a build failed.
    """
    request = LayerRequest(shape, routing, backend, device)
    digests = [worker.ask(request) for worker in workers]
    found = []
    for direction in DIRECTIONS:
        times: list[list[float]] = [[] for _ in workers]
        for number in range(rounds):
            for i in range(len(workers)):
                turn = (number + i) % len(workers)
                times[turn].append(workers[turn].ask(direction))
        for worker, spent, bits in zip(workers, times, digests, strict=True):
            ratio = ratio_of(spent, times[0])
            found.append(Found(letter, direction, worker.name, median(spent), ratio, bits == digests[0]))
    return found


def text(found: Found) -> str:
    """One line."""
    bits = "" if found.same_bits else ", OTHER BITS"
    return (
        f"{found.letter} {found.direction:8} {found.build:12} {found.ms:8.3f} ms, "
        f"{found.ratio.median:.3f} of the first ({found.ratio.low:.3f} to {found.ratio.high:.3f}){bits}"
    )


def named_folders(builds: Sequence[str]) -> list[tuple[str, Path]]:
    """The names and folders of NAME=FOLDER.

    Raises:
        typer.BadParameter: a word is not like that, a name stands twice, or there are less than two.
    """
    pairs = [build.partition("=") for build in builds]
    names = [name for name, _, _ in pairs]
    if len(pairs) < 2 or len(set(names)) < len(names) or any(not name or not folder for name, _, folder in pairs):
        raise typer.BadParameter(f"expected two or more NAME=FOLDER with names of their own, got {' '.join(builds)}")
    return [(name, Path(folder)) for name, _, folder in pairs]


def main(
    builds: Annotated[list[str], typer.Argument(help="NAME=FOLDER, where its libraries are; the base first")],
    shapes: Annotated[str, typer.Option(help="letters of shapes, by commas")] = "A,B,C,D,E,F",
    routing: Annotated[str, typer.Option(help="as of moe-megakernel bench")] = "uniform",
    backend: Annotated[str, typer.Option(help="mega or staged")] = "mega",
    rounds: Annotated[int, typer.Option(min=1)] = 25,
) -> None:
    """Times builds of the kernels in turn, with cold caches, and compares their bits."""
    known = benchmark_shapes()
    letters, folders = some_of(shapes, known, "--shapes"), named_folders(builds)
    require_gpu()
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, folder)) for name, folder in folders]
        for letter in letters:
            for found in compare(workers, letter, known[letter], routing, backend, rounds, "cuda"):
                typer.echo(text(found))


if __name__ == "__main__":
    typer.run(main)
