"""One group from several streams and threads of a process: streams are put in order, a second thread is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.dist_gpu.layers import Layer, Prepared, delay, gaps, reserve_for
from tests.distributed.pool import Pool
from tests.distributed.worker import Rank
from torch import Tensor

import moe_megakernel
from moe_megakernel import GroupError
from moe_megakernel.distributed.group import get_group

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

LAYERS = [
    Layer(150, 10, 3, 72, 40, routing={"zipf": 1.0}, options={"bias": True}),
    Layer(220, 6, 2, 136, 24, split=gaps),
]


def prepare(rank: Rank) -> list[Prepared]:
    batches = [layer.batch(rank) for layer in LAYERS]
    reserve_for(rank, batches)
    return [Prepared(rank, *batch) for batch in batches]


def check_two_streams(rank: Rank, backend: str) -> None:
    """Calls in turns on two streams that do not wait for each other: the library orders them."""
    steps = prepare(rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[list[Tensor]]] = [[], []]
    for turn in range(10):
        for number, (step, stream) in enumerate(zip(steps, streams, strict=True)):
            with torch.cuda.stream(stream):
                if turn % 2 == number:
                    delay(rank, 2_000_000)  # without an order, the other stream's call would overtake
                results[number].append(step.backward(step.forward(backend)))
    moe_megakernel.check_errors()  # waits for all streams
    for number, step in enumerate(steps):
        for turn, result in enumerate(results[number]):
            step.check(result, f"on stream {number}, turn {turn}")
    first = steps[0]
    first.check(first.backward(first.forward(backend)), "on the default stream")


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("backend", ["mega", "staged"])
def test_two_streams(pool: Pool, backend: str) -> None:
    pool.run(check_two_streams, backend, world=True)


def check_two_threads(rank: Rank) -> None:
    """While one thread is inside a call another one is refused; neither the call nor the group is harmed."""
    step = prepare(rank)[0]

    def call() -> Tensor:
        torch.cuda.set_device(rank.device)
        return step.forward()

    with ThreadPoolExecutor(1) as other:
        with (
            get_group(rank.name).step("a call of the first thread"),
            pytest.raises(GroupError, match="expected one call at a time, got one from a second thread"),
        ):
            other.submit(call).result()
        step.check(step.backward(other.submit(call).result()), "from the second thread, alone")
    step.check(step.backward(step.forward()), "from the first thread")


@pytest.mark.parametrize("pool", [2], indirect=True)
def test_two_threads(pool: Pool) -> None:
    pool.run(check_two_threads, world=True)
