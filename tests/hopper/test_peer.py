"""The host's part of the transport `peer` without a GPU: who may share memory, what records mean, what launches get."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_megakernel import _native, backends, errors, workspace, workspace_bytes
from moe_megakernel.distributed.group import Group
from moe_megakernel.errors import CapacityError, GroupError, MismatchError, MoEError, RoutingError
from moe_megakernel.hopper import peer
from moe_megakernel.hopper.device_status import StatusCode, StatusRecord
from moe_megakernel.hopper.ops import ACTIVATION_NUMBERS
from moe_megakernel.hopper.peer_memory import OVERLAP, PeerMemory, device_identity, sharing_fault
from moe_megakernel.hopper.peer_status import HeaderField, decode_group
from moe_megakernel.plan_names import Counter, Direction, Role, TaskKind
from moe_megakernel.schemas import Inputs, Options

HEADERS = Path(__file__).resolve().parents[2] / "kernels/include/moe"
OP = "dispatch_gemm_combine"
DEVICE = torch.device("cuda", 0)


# -- records ----------------------------------------------------------------------------------------------------------


def decoded(code: StatusCode, *values: int) -> MoEError:
    return decode_group(code, [*values, *[0] * (15 - len(values))])


def timeout(counter: int, index: int) -> MoEError:
    return decoded(StatusCode.TIMEOUT, 5, Role.COMPUTE, TaskKind.DRAIN, 17, counter, index, 8, 7, 1_500_000_000)


RECORDS: dict[str, tuple[MoEError, type[MoEError], str]] = {
    "bad id": (
        decoded(StatusCode.BAD_ID, 3, 77, 2, 6, 1),
        RoutingError,
        f"{OP}: topk_idx: expected -1 or an expert id in [0, 6), got 77 at topk_idx[1, 1] on rank 1",
    ),
    "many tokens": (
        decoded(StatusCode.MANY_TOKENS, 1, 9, 8),
        CapacityError,
        f"{OP}: x: expected at most 8 tokens on a rank, got 9 on rank 1; call moe_megakernel.reserve on every rank",
    ),
    "full": (
        decoded(StatusCode.FULL, 2, 69, 3),
        CapacityError,
        f"{OP}: row_capacity: expected at most 3 rows on a rank, got 69 needed on rank 2; call moe_megakernel.reserve "
        "on every rank or pass a larger row_capacity",
    ),
    "peer refused": (
        decoded(StatusCode.PEER_REFUSED, 3),
        MoEError,
        f"{OP}: route: rank 3 refused its arguments; see its own error",
    ),
    "peer aborted": (
        decoded(StatusCode.PEER_ABORTED, 3),
        GroupError,
        f"{OP}: another rank gave up waiting for rank 3; the step's outputs are NaN",
    ),
    "late to arrive": (
        timeout(Counter.PEER_READY, 3),
        GroupError,
        f"{OP}: rank 3 did not arrive within 1.5 s; the step's outputs are NaN",
    ),
    "late to finish": (
        timeout(Counter.PEER_DONE, 2),
        GroupError,
        f"{OP}: rank 2 did not finish within 1.5 s; the step's outputs are NaN",
    ),
    "a wait of its own": (
        timeout(Counter.STORED, 0),
        GroupError,
        f"{OP}: timeout: expected stored[0] to reach 8 within 1.5 s, got 7; block 5, role compute, task drain, "
        "ticket 17; the step's outputs are NaN",
    ),
    "an unknown counter": (
        timeout(99, 0),
        GroupError,
        f"{OP}: timeout: expected 99[0] to reach 8 within 1.5 s, got 7; block 5, role compute, task drain, "
        "ticket 17; the step's outputs are NaN",
    ),
    "an unknown code": (
        decoded(42),  # type: ignore[arg-type]
        MoEError,
        f"{OP}: expected a known status of the kernels, got code 42 with values {[0] * 15}",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_records(case: str) -> None:
    error, kind, message = RECORDS[case]
    assert type(error) is kind
    assert str(error) == message


def test_every_code_has_a_record_here() -> None:
    named = {"bad id", "timeout", "mismatch", "many tokens", "full", "peer aborted", "peer refused", "none"}
    assert {code.name.lower().replace("_", " ") for code in StatusCode} == named


def bits(value: float) -> int:
    """A float32 as the header's int64 holds it."""
    return struct.unpack("i", struct.pack("f", value))[0]


#: What rank 0 and rank 2 hold, and how the message shows the field and both.
FIELDS: dict[HeaderField, tuple[int, int, str, str, str]] = {
    HeaderField.HIDDEN: (64, 48, "hidden width of x", "64", "48"),
    HeaderField.WIDTH: (40, 24, "expert width", "40", "24"),
    HeaderField.NUM_EXPERTS: (9, 8, "num_experts", "9", "8"),
    HeaderField.TOP_K: (2, 1, "top_k", "2", "1"),
    HeaderField.MAX_TOKENS: (100, 200, "max_tokens", "100", "200"),
    HeaderField.ROW_CAPACITY: (400, 7, "row_capacity", "400", "7"),
    HeaderField.ACTIVATION: (
        ACTIVATION_NUMBERS["swiglu"],
        ACTIVATION_NUMBERS["relu2"],
        "activation",
        "swiglu",
        "relu2",
    ),
    HeaderField.ALPHA: (bits(1.0), bits(-0.5), "alpha of the activation", "1.0", "-0.5"),
    HeaderField.LIMIT: (bits(float("inf")), bits(7.0), "limit of the activation", "inf", "7.0"),
    HeaderField.NEEDS: (1, 8, "inputs that require grad", "['x']", "['w_down']"),
    HeaderField.SENDS_X: (1, 0, "recompute or frozen weights", "1", "0"),
}


@pytest.mark.parametrize("field", HeaderField)
def test_fields_that_differ(field: HeaderField) -> None:
    if field == HeaderField.DIRECTION:
        error = decoded(StatusCode.MISMATCH, field, Direction.FORWARD, 2, Direction.BACKWARD)
        expected = f"{OP}: route: expected the same call on all ranks, got {OP} on rank 0 and {OP} backward on rank 2"
    else:
        first, other, name, shown, shown_other = FIELDS[field]
        error = decoded(StatusCode.MISMATCH, field, first, 2, other)
        expected = f"{OP}: {name}: expected the same on all ranks, got {shown} on rank 0 and {shown_other} on rank 2"
    assert type(error) is MismatchError
    assert str(error) == expected


def test_fields_are_those_of_the_header() -> None:
    text = (HEADERS / "plan/layout.h").read_text()
    found = re.search(r"enum class HeaderField[^{]*\{(.*?)\n\};", text, re.DOTALL)
    assert found is not None
    names = re.findall(r"^  k(\w+)(?: = 0)?,", found[1], re.MULTILINE)
    assert [name.upper() for name in names] == [field.name.replace("_", "") for field in HeaderField]
    assert [field.value for field in HeaderField] == list(range(len(names)))
    assert re.findall(r"kHeaderFields = (\d+);", text) == [str(len(names))]


class StandInGroup:
    """As much of `Group` as the transport asks for, of the first of two ranks. `gates` are the phases it has met at."""

    ranks, rank, name = 2, 0, "pair"

    def __init__(self, **others: Any) -> None:
        self.peer_fault: str | None = None
        self.tried_across_hosts = False
        self.max_tokens, self.row_capacity = 8, 32
        self.peer: Any = None
        self.outgrown: list[Any] = []
        self.others = others
        self.gates: list[str] = []
        self.failures: list[str] = []

    @contextmanager
    def step(self, op: str) -> Iterator[None]:
        yield

    def gate(self, op: str, phase: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        self.gates.append(phase)
        return [payload, {**payload, **self.others}]

    def fail(self, message: str) -> None:
        self.failures.append(message)


@pytest.mark.parametrize(("code", "fails"), [(StatusCode.PEER_REFUSED, False), (StatusCode.PEER_ABORTED, True)])
def test_only_errors_of_a_group_end_it(code: StatusCode, fails: bool) -> None:
    group: Any = StandInGroup()
    record = StatusRecord(DEVICE, torch.zeros(16, dtype=torch.int64), group)
    record.tensor[:2] = torch.tensor([code, 1])
    error = record.take()
    assert isinstance(error, GroupError) == fails
    assert group.failures == ([f"rank 0 reports: {error}"] if fails else [])
    assert record.take() is None, "it is told once"


def test_a_pending_error_of_a_kind_can_be_forgotten() -> None:
    errors._pending.clear()
    errors.defer(DEVICE, RoutingError("stays"))
    errors.forget_pending(DEVICE, GroupError)
    with pytest.raises(RoutingError, match="stays"):
        errors.raise_pending(DEVICE)
    errors.defer(DEVICE, GroupError("goes"))
    errors.forget_pending(DEVICE, GroupError)
    errors.raise_pending(DEVICE)


# -- who can share memory ---------------------------------------------------------------------------------------------


def identity(host: str = "a", device: str = "0", overlap: str = "") -> dict[str, Any]:
    return {"host": host, "device": device, "overlap": overlap}


def test_identity_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid of {device}"))
    monkeypatch.setenv(OVERLAP, "1")
    found = device_identity(DEVICE)
    assert found == {"host": found["host"], "device": "uuid of cuda:0", "overlap": "1"}
    assert found["host"], "the same in all processes of a host"
    monkeypatch.delenv(OVERLAP)
    assert device_identity(DEVICE) == {**found, "overlap": ""}


def test_devices_of_one_host_are_shared() -> None:
    assert sharing_fault([identity(device=str(d)) for d in range(8)], across_hosts=False) == ""


def test_hosts_are_crossed_only_if_asked_for() -> None:
    identities = [identity(), identity(device="1"), identity("b", "2")]
    assert sharing_fault(identities, across_hosts=False) == (
        'ranks 0 and 2 are on different hosts (transport="peer" tries it nevertheless)'
    )
    assert sharing_fault(identities, across_hosts=True) == ""


@pytest.mark.parametrize("overlaps", [("", ""), ("1", ""), ("", "1"), ("0", "0")])
def test_one_device_for_two_ranks_needs_the_variable_in_both(overlaps: tuple[str, str]) -> None:
    """torch would leave a rank that has it waiting for one that has not."""
    identities = [identity(device="7"), identity(overlap=overlaps[0]), identity(overlap=overlaps[1])]
    message = f"ranks 1 and 2 are on one device and {OVERLAP}=1 is not set"
    for across_hosts in (False, True):
        assert sharing_fault(identities, across_hosts) == message
    assert sharing_fault([identity(overlap="1")] * 3, across_hosts=False) == ""


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sizes of memory that has been made, for nothing; an exception instead of it if the first entry is one."""
    made: list[Any] = []

    def make(group: Any, device: torch.device, *sizes: int) -> object:
        if made and isinstance(made[0], Exception):
            raise made[0]
        made.append(sizes)
        return object()

    monkeypatch.setattr(peer, "PeerMemory", make)
    monkeypatch.setattr(peer, "device_identity", lambda device: identity())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_ranks_try_once(trials: list[Any]) -> None:
    group: Any = StandInGroup(device="1")
    for asked in ("auto", "peer", "auto"):
        assert peer.peer_fault(group, DEVICE, asked) == ""
    assert group.gates == ["transport", "mapped"]
    assert trials == [(4096, 4096)]


def test_peer_tries_between_hosts_where_auto_did_not(trials: list[Any]) -> None:
    group: Any = StandInGroup(host="b", device="1")
    for _ in range(2):
        assert "different hosts" in peer.peer_fault(group, DEVICE, "auto")
    assert group.gates == ["transport"]
    for asked in ("peer", "auto", "peer"):
        assert peer.peer_fault(group, DEVICE, asked) == ""
    assert group.gates == ["transport", "transport", "mapped"]


def test_a_trial_that_fails_is_the_reason(trials: list[Any]) -> None:
    trials.append(RuntimeError("CUDASymmetricMemory requires more\nand more"))
    group: Any = StandInGroup(device="1")
    for asked in ("peer", "auto", "peer"):
        assert peer.peer_fault(group, DEVICE, asked) == "rank 0: CUDASymmetricMemory requires more"
    assert group.gates == ["transport", "mapped"]


def test_ranks_that_ask_for_different_transports(trials: list[Any]) -> None:
    group: Any = StandInGroup(transport="auto")
    message = f"{OP}: transport: expected the same on all ranks, got peer on rank 0 and auto on rank 1"
    with pytest.raises(MismatchError, match=re.escape(message)):
        peer.peer_fault(group, DEVICE, "peer")
    assert group.peer_fault is None


def test_first_use_in_a_capture_is_refused(trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(MoEError, match="memory: expected it agreed between the ranks before a CUDA graph is captured"):
        peer.peer_fault(StandInGroup(), DEVICE, "auto")  # type: ignore[arg-type]


def test_transports_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "built_capabilities", lambda: ((9, 0),))
    assert backends.available_transports("cuda") == {"peer": "", "collective": ""}
    assert backends.available_transports("cpu") == {"peer": "needs CUDA devices", "collective": ""}
    assert backends.select_transport("auto", "cuda") == "auto", "the ranks have to find out"
    assert backends.select_transport("peer", "cuda") == "peer"
    assert backends.select_transport("collective", "cuda") == "collective"
    assert backends.select_transport("auto", "cpu") == "collective"
    monkeypatch.setattr(backends, "built_capabilities", lambda: ())
    assert backends.available_transports("cuda")["peer"] == "not in this build (needs the CUDA kernels)"
    assert backends.select_transport("auto", "cuda") == "collective"
    message = f"{OP}: transport: expected one usable here (collective), got 'peer': not in this build"
    with pytest.raises(ValueError, match=re.escape(message)):
        backends.select_transport("peer", "cuda")


# -- memory and launches ----------------------------------------------------------------------------------------------


def note(asked: list[Any], answer: tuple[int, int]) -> Callable[..., tuple[int, int]]:
    """A `group_bytes` that notes what it is asked."""

    def group_bytes(*sizes: int) -> tuple[int, int]:
        asked.append(sizes)
        return answer

    return group_bytes


def memory_of(shared_bytes: int = 4096, workspace_bytes: int = 4096) -> PeerMemory:
    """Rank 1 of 3, without memory."""
    memory = PeerMemory.__new__(PeerMemory)
    memory.device, memory.shared_bytes, memory.workspace_bytes = DEVICE, shared_bytes, workspace_bytes
    memory._ranks, memory._rank, memory._bases, memory._own, memory._numbers = 3, 1, 1000, 2000, {}
    return memory


def test_numbers_are_the_fields_of_the_header() -> None:
    text = (HEADERS / "peer/memory.h").read_text()
    found = re.search(r"struct PeerGroup \{(.*?)\n\};", text, re.DOTALL)
    assert found is not None
    fields = re.findall(r"std::int64_t (\w+);", found[1])
    memory = memory_of(shared_bytes=5000)
    numbers = memory.numbers(max_tokens=8, row_capacity=32, needs=63)
    named = dict(zip(fields, numbers.tolist(), strict=True))
    assert named == {
        "num_ranks": 3,
        "rank": 1,
        "max_tokens": 8,
        "row_capacity": 32,
        "needs": 63,
        "bases": 1000,
        "own": 2000,
        "bytes": 5000,
    }
    assert re.findall(r"kPeerGroupFields = (\d+);", text) == [str(numbers.numel())]
    assert memory.numbers(8, 32, 63) is numbers
    assert memory.numbers(8, 32, 0) is not numbers


def test_memory_holds_what_is_not_larger() -> None:
    memory = memory_of(100, 200)
    assert memory.holds(100, 200)
    assert not memory.holds(101, 1)
    assert not memory.holds(1, 201)


def refused_inputs(dtype: torch.dtype = torch.bfloat16, hidden: int = 16) -> Any:
    x, idx = torch.empty(5, hidden, dtype=dtype, device="meta"), torch.empty(5, 2, device="meta")
    w_gate_up = torch.empty(3, 16, hidden, dtype=dtype, device="meta")
    return (x, idx, idx, w_gate_up, torch.empty(3, hidden, 8, dtype=dtype, device="meta"), *[None] * 4)


@pytest.mark.parametrize(
    ("dtype", "needed", "here"),
    [(torch.bfloat16, 4096, True), (torch.bfloat16, 4097, False), (torch.float32, 1, False)],
)
def test_a_refusal_goes_where_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, needed: int, here: bool
) -> None:
    """On the device where their call fits what there is; at a gate where memory grows, or the reference runs."""
    asked: list[Any] = []
    monkeypatch.setattr(peer, "device_sms", lambda index: 132)
    monkeypatch.setattr(peer, "group_bytes", note(asked, (needed, 1)))
    group: Any = StandInGroup()
    assert peer._would_run_in(memory_of(), group, refused_inputs(dtype), 6, -1, False) == here
    assert asked == ([(8, 2, 6, 16, 8, True, False, 132, 2, 32)] if dtype == torch.bfloat16 else [])


def test_a_refusal_that_makes_no_sense_goes_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*sizes: int) -> tuple[int, int]:
        raise RuntimeError("moe::hopper_group_bytes: no such layer")

    monkeypatch.setattr(peer, "device_sms", lambda index: 132)
    monkeypatch.setattr(peer, "group_bytes", fail)
    group: Any = StandInGroup()
    inputs = refused_inputs()
    assert peer._would_run_in(memory_of(), group, inputs, 6, -1, False)
    assert peer._would_run_in(memory_of(), group, (inputs[0], inputs[0][0], *inputs[2:]), 6, -1, False)


def test_without_memory_a_refusal_goes_to_the_store() -> None:
    group: Any = StandInGroup()
    assert not peer.refuse_step(group, refused_inputs(), 6, -1, "auto", "auto")


def test_refused_arguments_are_heard_at_every_gate_of_the_call() -> None:
    """The rank that refuses them does not know whether the others agree on memory, or on rows."""
    refused = {"op": OP, "phase": "route", "error": "TypeError: no"}
    waiting: Any = SimpleNamespace(rank=0)
    for phase in ("transport", "memory", "route"):
        message = re.escape(f"{OP}: {phase}: rank 1 refused its arguments: TypeError: no")
        with pytest.raises(MoEError, match=f"^{message}$"):
            Group._check_arrivals(waiting, OP, phase, [{"op": OP, "phase": phase}, refused])
    with pytest.raises(MismatchError, match="expected the same call on all ranks"):
        Group._check_arrivals(waiting, "reserve", "route", [{"op": "reserve", "phase": "route"}, refused])


def test_more_rows_than_agreed_are_refused_before_memory_is_looked_at() -> None:
    group: Any = StandInGroup()
    inputs = Inputs(*refused_inputs())
    options = Options("swiglu", 1.0, 7.0, "mega", 0, False)
    forward = peer.peer_forward.__wrapped__  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match="row_capacity: expected at most the 32 rows agreed, got 33"):
        forward(inputs.x, group, inputs, 6, 33, options)
    assert not group.gates


# -- workspace_bytes --------------------------------------------------------------------------------------------------

FIGURES: dict[str, Any] = {"tokens": 5, "hidden": 16, "expert_width": 8, "num_experts": 3, "top_k": 2, "ranks": 2}


def test_workspace_bytes_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(_native, "load_cuda", lambda: True)
    monkeypatch.setattr(workspace, "group_bytes", note(asked, (3000, 4000)))
    kernels: dict[str, Any] = {"backend": "staged", "transport": "peer", "num_sms": 100}
    sizes = workspace_bytes(**FIGURES, **kernels, rank=1)
    assert asked == [(5, 2, 3, 16, 8, True, True, 100, 2, 20)]
    assert sizes == {
        "saved.h": 20 * 16 * 2,
        "saved.expert_offsets": 4 * 2,
        "saved.row_route": 4 * 20,
        "saved.route_order": 4 * 10,
        "saved.splits": 8 * 2 * 2,
        "group.shared": 3000,
        "group.workspace": 4000,
    }
    inference = workspace_bytes(**FIGURES, **kernels, row_capacity=7, activation="relu2", training=False)
    assert inference == {"group.shared": 3000, "group.workspace": 4000}
    assert asked[1] == (5, 2, 3, 16, 8, False, True, 100, 2, 7)


def test_workspace_bytes_takes_peer_with_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "workspace_bytes: transport: expected 'collective' with backend 'reference', got 'peer'"
    with pytest.raises(ValueError, match=message):
        workspace_bytes(**FIGURES, transport="peer")
    with pytest.raises(ValueError, match="transport: expected one of peer, collective, got 'auto'"):
        workspace_bytes(**FIGURES, transport="auto")
    alone = {**FIGURES, "ranks": 1}
    assert workspace_bytes(**alone, transport="peer") == workspace_bytes(**alone)
