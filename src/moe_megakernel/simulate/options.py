"""What is simulated: the options of `moe-megakernel simulate`, checked, with their defaults, and the task orders.

Read by every other file of the package. An order says how the plan's tasks are laid out and who moves the rows; the
costs stand in `costs` and `hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_megakernel.hardware import Hardware, find_hardware
from moe_megakernel.shapes import Shape, find_shape

DTYPES = ("bf16", "fp8")
DIRECTIONS = ("forward", "backward", "both")
TRANSPORTS = ("pull", "push")


class SimulateError(ValueError):
    """An option that cannot be simulated; reads `simulate: argument: expected ..., got ...`."""

    def __init__(self, argument: str, expected: str, got: object) -> None:
        super().__init__(f"simulate: {argument}: expected {expected}, got {got}")


@dataclass(frozen=True)
class Order:
    """How tasks follow each other and who moves rows."""

    name: str
    summary: str
    lag: int = 1
    separate: bool = False  # a launch and a full stop between stages
    wait_for: str = "tile"  # a counter covers: tile, minibatch, layer
    fused_activation: bool = True  # in gate_up's epilogue; else a pass of its own
    comm_sms: dict[str, int] | None = None  # SMs of their own for rows, by direction; None: spare warps of all blocks
    row_padding: int = 128  # rows of an expert are computed in multiples of it
    barriers: int = 0  # bulk barriers of all ranks around the layer


ORDERS: dict[str, Order] = {
    order.name: order
    for order in (
        Order(
            "separate",
            "dispatch, gate_up, down and combine one after the other, each a launch on all SMs",
            separate=True,
            wait_for="layer",
        ),
        Order("unlagged", "one launch; down right behind gate_up of the same minibatch; spare warps pull", lag=0),
        Order("lagged", "one launch; down one minibatch behind gate_up; spare warps pull (this project's order)"),
        Order(
            "sm-split",
            "one launch; SMs of their own move rows, counters cover minibatches, two bulk barriers",
            lag=0,
            wait_for="minibatch",
            fused_activation=False,
            comm_sms={"forward": 40, "backward": 28},  # Mixture-of-Kittens' published defaults
            row_padding=256,
            barriers=2,
        ),
    )
}


@dataclass(frozen=True)
class Options:
    """One simulation. `tokens` is T of every rank; -1 stands for "take the default"."""

    shape: Shape
    hardware: Hardware
    ranks: int = 1
    tokens: int = -1  # default: the shape's own, else 2048
    dtype: str = "bf16"
    direction: str = "forward"
    routing: str = "uniform"
    order: str = "lagged"
    transport: str = "pull"
    comm_sms: int = -1  # default: the order's; 0: spare warps
    minibatch_rows: int = -1  # default: two waves of gate_up tasks
    seed: int = 0
    expected_routing: bool = False  # expected counts instead of drawn ones

    def __post_init__(self) -> None:
        if self.tokens == -1:
            object.__setattr__(self, "tokens", 2048 if self.shape.tokens is None else self.shape.tokens)
        _check_number("ranks", self.ranks, 1, self.hardware.domain, f"GPUs of one {self.hardware.name} domain")
        _check_number("tokens", self.tokens, 1, 1 << 20, "tokens a rank")
        _check_name("dtype", self.dtype, DTYPES)
        _check_name("direction", self.direction, DIRECTIONS)
        _check_name("order", self.order, tuple(ORDERS))
        _check_name("transport", self.transport, TRANSPORTS)
        if self.comm_sms != -1:
            most = self.hardware.sms - 2
            if not 0 <= self.comm_sms <= most or self.comm_sms % 2:
                raise SimulateError("comm-sms", f"an even number from 0 to {most}", self.comm_sms)
        if self.minibatch_rows != -1:
            _check_number("minibatch-rows", self.minibatch_rows, 128, 1 << 24, "rows, a multiple of 128")
            if self.minibatch_rows % 128:
                raise SimulateError("minibatch-rows", "a multiple of 128", self.minibatch_rows)
        from .routing import parse_routing

        parse_routing(self.routing)

    @property
    def how(self) -> Order:
        return ORDERS[self.order]

    def communication_sms(self, direction: str) -> int:
        """SMs that only move rows in this direction; 0 where spare warps do."""
        if self.comm_sms != -1:
            return self.comm_sms
        return 0 if self.how.comm_sms is None else self.how.comm_sms[direction]

    def clusters(self, direction: str) -> int:
        """Clusters of two blocks that compute."""
        return (self.hardware.sms - self.communication_sms(direction)) // 2


def make_options(shape: str, hardware: str, **rest: object) -> Options:
    """`Options` from names, as the command line has them.

    Raises:
        SimulateError: an unknown name or a value out of range.
    """
    try:
        found = find_shape(shape, "simulate"), find_hardware(hardware, "simulate")
    except ValueError as error:
        argument, expected = str(error).removeprefix("simulate: ").split(": expected ")
        raise SimulateError(argument, *expected.rsplit(", got ", 1)) from None
    return Options(*found, **rest)  # type: ignore[arg-type]


def _check_name(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SimulateError(argument, f"one of {', '.join(allowed)}", repr(value))


def _check_number(argument: str, value: int, least: int, most: int, what: str) -> None:
    if not least <= value <= most:
        raise SimulateError(argument, f"{least} to {most} {what}", value)
