"""What a record of the device means, and when it is raised. The records are written here, not by a device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_megakernel
from moe_megakernel import errors
from moe_megakernel.errors import MoEError, RoutingError
from moe_megakernel.hopper import device_status, workspaces
from moe_megakernel.hopper.device_status import NUM_WORDS, StatusCode, StatusRecord, decode
from moe_megakernel.plan_names import Counter, Role, TaskKind
from moe_megakernel.reference.layer import routing_error

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
TIMEOUT = [5, Role.LOAD, TaskKind.DOWN, 17, Counter.A_READY, 3, 8, 7, 1_500_000_000]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, StatusRecord]]:
    made = {d.index: StatusRecord(d, torch.zeros(NUM_WORDS, dtype=torch.int64)) for d in (FIRST, SECOND)}
    monkeypatch.setattr(device_status, "_records", made)
    errors._pending.clear()
    yield made
    errors._pending.clear()
    workspaces.release_workspaces()


def write(record: StatusRecord, code: int, values: list[int]) -> None:
    record.tensor[1 : 1 + len(values)] = torch.tensor(values)
    record.tensor[0] = code


def test_codes_and_length_are_those_of_the_header() -> None:
    header = (Path(__file__).resolve().parents[2] / "kernels/include/moe/forward/status.h").read_text()
    codes = {name: int(value) for name, value in re.findall(r"k(\w+) = (\d),", header)}
    assert {name.upper(): value for name, value in codes.items()} == {
        code.name.replace("_", ""): code.value for code in StatusCode
    }
    (values,) = re.findall(r"kStatusValues = (\d+);", header)
    assert int(values) + 1 == NUM_WORDS


def test_a_bad_id_reads_as_on_the_reference_backend() -> None:
    topk_idx = torch.tensor([[0, 1], [2, 77]])
    error = decode(StatusCode.BAD_ID, [3, 77, 2, 6, *[0] * 11])
    assert type(error) is RoutingError
    assert str(error) == str(routing_error("dispatch_gemm_combine", topk_idx, 3, 6))
    assert str(error).endswith("expected -1 or an expert id in [0, 6), got 77 at topk_idx[1, 1]")


def test_a_timeout_names_the_site() -> None:
    error = decode(StatusCode.TIMEOUT, [*TIMEOUT, *[0] * 6])
    assert type(error) is MoEError
    assert str(error) == (
        "dispatch_gemm_combine: timeout: expected a_ready[3] to reach 8 within 1.5 s, got 7; "
        "block 5, role load, task down, ticket 17; the step's outputs are NaN"
    )


def test_numbers_without_a_name_stay_numbers() -> None:
    text = str(decode(StatusCode.TIMEOUT, [5, 9, -1, -1, 99, 3, 8, 7, 10**9, *[0] * 6]))
    assert "expected 99[3] to reach" in text
    assert "role 9, task -1" in text
    assert "expected a known status of the kernels, got code 42" in str(decode(42, [0] * 15))


def test_the_next_call_on_the_device_raises_and_forgets(records: dict[int, StatusRecord]) -> None:
    write(records[0], StatusCode.BAD_ID, [3, 77, 2, 6])
    errors.raise_pending(SECOND)
    errors.raise_pending(torch.device("cpu"))
    with pytest.raises(RoutingError, match=r"got 77 at topk_idx\[1, 1\]"):
        errors.raise_pending(FIRST)
    assert records[0].tensor[0] == StatusCode.NONE, "the device may write the next"
    errors.raise_pending(FIRST)


def test_check_errors_looks_at_every_device(records: dict[int, StatusRecord]) -> None:
    write(records[1], StatusCode.TIMEOUT, TIMEOUT)
    with pytest.raises(MoEError, match="a_ready"):
        moe_megakernel.check_errors()
    moe_megakernel.check_errors()


@pytest.mark.parametrize(("code", "kept"), [(StatusCode.BAD_ID, True), (StatusCode.TIMEOUT, False)])
def test_a_timeout_drops_the_workspaces_of_its_device(
    records: dict[int, StatusRecord], code: StatusCode, kept: bool
) -> None:
    mine, other = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    workspaces._cache.update({(0, 5): mine, (1, 5): other})
    write(records[0], code, TIMEOUT)
    with pytest.raises(MoEError):
        errors.raise_pending(FIRST)
    assert ((0, 5) in workspaces._cache) == kept
    assert workspaces._cache[(1, 5)] is other


def test_a_first_call_under_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_status, "_records", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MoEError, match="expected a call on cuda:0 before a CUDA graph is captured there, got none"):
        device_status.status_record(FIRST)
