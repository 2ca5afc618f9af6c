"""What the kernels of a group report when a step fails, as errors: the records of `device_status` that name ranks.

The messages are those of the collective transport (`distributed.capacity`, `distributed.layer`), so that who reads them
need not know how rows travel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from ..errors import CapacityError, GroupError, MismatchError, MoEError, invalid_id
from ..plan_names import Counter, Direction
from ..schemas import unpack_needs
from .device_status import OP, StatusCode, decode
from .ops import ACTIVATION_NUMBERS

_CALLS = {Direction.FORWARD: OP, Direction.BACKWARD: f"{OP} backward"}
_ADVICE = "call moe_megakernel.reserve on every rank"


class HeaderField(IntEnum):
    """`HeaderField` in `moe/plan/layout.h`."""

    DIRECTION = 0
    HIDDEN = 1
    WIDTH = 2
    NUM_EXPERTS = 3
    TOP_K = 4
    MAX_TOKENS = 5
    ROW_CAPACITY = 6
    ACTIVATION = 7
    ALPHA = 8
    LIMIT = 9
    NEEDS = 10
    SENDS_X = 11


_FIELD_NAMES = {
    HeaderField.HIDDEN: "hidden width of x",
    HeaderField.WIDTH: "expert width",
    HeaderField.NUM_EXPERTS: "num_experts",
    HeaderField.TOP_K: "top_k",
    HeaderField.MAX_TOKENS: "max_tokens",
    HeaderField.ROW_CAPACITY: "row_capacity",
    HeaderField.ACTIVATION: "activation",
    HeaderField.ALPHA: "alpha of the activation",
    HeaderField.LIMIT: "limit of the activation",
    HeaderField.NEEDS: "inputs that require grad",
    HeaderField.SENDS_X: "recompute or frozen weights",
}


def decode_group(code: int, values: Sequence[int]) -> MoEError:
    """The error that a record of a group's launch means; a `GroupError` if the group cannot be used any more.

    Args:
        code: a `StatusCode`.
        values: the words behind it, see `moe/forward/status.h`.
    """
    if code == StatusCode.BAD_ID:
        position, value, top_k, num_experts, rank = values[:5]
        return invalid_id(OP, position, value, top_k, num_experts, rank)
    if code == StatusCode.MISMATCH:
        return _mismatch(*values[:4])
    if code == StatusCode.MANY_TOKENS:
        rank, tokens, most = values[:3]
        return CapacityError(
            f"{OP}: x: expected at most {most} tokens on a rank, got {tokens} on rank {rank}; {_ADVICE}"
        )
    if code == StatusCode.FULL:
        rank, rows, capacity = values[:3]
        return CapacityError(
            f"{OP}: row_capacity: expected at most {capacity} rows on a rank, got {rows} needed on rank {rank}; "
            f"{_ADVICE} or pass a larger row_capacity"
        )
    if code == StatusCode.PEER_REFUSED:
        return MoEError(f"{OP}: route: rank {values[0]} refused its arguments; see its own error")
    if code == StatusCode.PEER_ABORTED:
        return GroupError(f"{OP}: another rank gave up waiting for rank {values[0]}; the step's outputs are NaN")
    if code == StatusCode.TIMEOUT:
        counter, index, timeout_ns = values[4], values[5], values[8]
        late = {int(Counter.PEER_READY): "arrive", int(Counter.PEER_DONE): "finish"}.get(counter)
        if late is not None:
            return GroupError(
                f"{OP}: rank {index} did not {late} within {timeout_ns / 1e9:g} s; the step's outputs are NaN"
            )
        return GroupError(str(decode(code, values)))
    return decode(code, values)


def _mismatch(number: int, first: int, rank: int, other: int) -> MismatchError:
    field = HeaderField(number)
    if field == HeaderField.DIRECTION:
        calls = [_CALLS.get(Direction(value), str(value)) for value in (first, other)]
        return MismatchError(
            f"{OP}: route: expected the same call on all ranks, got {calls[0]} on rank 0 and {calls[1]} on rank {rank}"
        )
    values = [_value(field, value) for value in (first, other)]
    return MismatchError(
        f"{OP}: {_FIELD_NAMES[field]}: expected the same on all ranks, got {values[0]} on rank 0 and {values[1]} on "
        f"rank {rank}"
    )


def _value(field: HeaderField, value: int) -> object:
    if field == HeaderField.ACTIVATION:
        return {number: name for name, number in ACTIVATION_NUMBERS.items()}.get(value, value)
    if field in (HeaderField.ALPHA, HeaderField.LIMIT):
        return struct.unpack("f", struct.pack("i", value))[0]
    if field == HeaderField.NEEDS:
        return unpack_needs(value).names()
    return value
