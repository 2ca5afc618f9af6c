"""What one process knows about a process group: call counter, agreed capacities, and whether the group is still usable.

Before rows move, all ranks meet at a *gate* in the group's key-value store: each publishes what it is about to do and
reads what the others do. So a rank that is late, raised or died is named within the timeout, a mismatch is an error on
every rank, and no collective is left hanging. Used by `distributed.layer` and `distributed.capacity`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from ..config import get_timeout
from ..errors import GroupError, MismatchError, MoEError, forget_pending

if TYPE_CHECKING:
    from ..hopper.peer_memory import PeerMemory

#: Seconds of the one blocking wait in the store; most peers arrive within it. The store warns of each that runs out.
_BLOCKING = 2.0
#: Seconds between two looks at the store after that.
_POLL = 0.02
#: Seconds that a rank whose transport failed gives the others to say that they live.
_ROLL_CALL = 10.0


class Group:
    """State of one process group in this process; get it by `get_group`."""

    def __init__(self, name: str, pg: dist.ProcessGroup) -> None:
        self.name = name
        self.rank, self.ranks = pg.rank(), pg.size()
        # Weak, so that a destroyed group's connections and store are not kept open from here.
        self._pg = weakref.ref(pg)
        #: Rows that a rank can receive and tokens it can send, agreed by all ranks; None before the first use.
        self.max_tokens: int | None = None
        self.row_capacity: int | None = None
        # A group that was destroyed and made again under the same name must not read the old one's keys.
        self._life = self._store.add(f"moe/{name}/life/{self.rank}", 1)
        self._epoch = 0
        self._gates = 0
        self._failure: str | None = None
        #: A collective was left in flight: the process group cannot be used again, the store can.
        self.broken = False
        self._lock = threading.Lock()
        #: Why the `peer` transport cannot be used, "" if it can; None before the ranks have found out.
        self.peer_fault: str | None = None
        self.tried_across_hosts = False
        #: What the ranks share for it, and what captured graphs still use.
        self.peer: PeerMemory | None = None
        self.outgrown: list[PeerMemory] = []

    @property
    def pg(self) -> dist.ProcessGroup | None:
        """The process group, or None once it has been destroyed."""
        return self._pg()

    @property
    def _store(self) -> Any:
        c10d: Any = dist.distributed_c10d  # its stubs know neither these private names nor all stores' methods
        return c10d._get_process_group_store(self._pg())

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("moe", self.name, self._life, self._epoch, *parts)))

    # -- the frame of a call ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self, op: str) -> Iterator[None]:
        """Frames one collective call: one thread at a time, and an unforeseen error here is told to the other ranks.

        Errors that all ranks decide alike at a gate (`MoEError` other than `GroupError`) leave the group usable.

        Raises:
            GroupError: the group has failed before, or another thread of this process is inside a call.
        """
        if not self._lock.acquire(blocking=False):
            raise GroupError(f"{op}: group {self.name}: expected one call at a time, got one from a second thread")
        try:
            if self._failure is not None:
                raise GroupError(f"{op}: group {self.name} is unusable until every rank calls rebuild: {self._failure}")
            yield
        except MoEError:
            raise
        except BaseException as error:
            self._record_failure(f"{op}: rank {self.rank} raised {type(error).__name__}: {error}")
            raise
        finally:
            self._lock.release()

    # -- gates --------------------------------------------------------------------------------------------------------

    def gate(self, op: str, phase: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Publishes `payload`, waits for all ranks, and returns every rank's payload in rank order.

        Raises:
            MismatchError: on every rank, if they are not all at this phase of this op.
            MoEError: on every other rank, if one publishes an error (key "error") instead of coming with its arguments.
            GroupError: a rank did not come within the timeout, or one has reported a failure. Names op, phase and rank.
        """
        timeout = get_timeout()
        gate = self._gates
        self._gates += 1
        keys = [self._key(gate, r) for r in range(self.ranks)]
        deadline = time.monotonic() + timeout
        try:
            self._store.set(keys[self.rank], json.dumps({"op": op, "phase": phase, **payload}))
            if gate >= 2:
                # Everybody has passed gate - 2: this rank has passed gate - 1, which takes every rank's arrival there.
                self._store.delete_key(self._key(gate - 2, self.rank))
            arrived_all = self._wait(keys, min(_BLOCKING, timeout))
            while not arrived_all:
                self.raise_if_reported(op, phase)
                if time.monotonic() >= deadline:
                    missing = [r for r in range(self.ranks) if not self._store.check([keys[r]])]
                    if missing:
                        self._fail(op, phase, f"{_ranks_text(missing)} did not arrive within {timeout:g} s")
                time.sleep(_POLL)
                arrived_all = self._store.check(keys)
            # A rank that comes after the others have given up must not go on to a collective they will never join.
            self.raise_if_reported(op, phase)
            arrived = [json.loads(text) for text in self._get(keys)]
        except MoEError:
            raise
        except Exception as error:
            self._fail(op, phase, f"the group's store failed; its host, usually rank 0, may have died ({error})")
        self._check_arrivals(op, phase, arrived)
        return arrived

    def report(self, op: str, phase: str, error: Exception) -> None:
        """Publishes an error of this rank's own arguments at the gate where the others wait, so that they raise too."""
        with contextlib.suppress(MoEError), self.step(op):
            self.gate(op, phase, {"error": f"{type(error).__name__}: {error}"})

    def _check_arrivals(self, op: str, phase: str, arrived: list[dict[str, Any]]) -> None:
        # First: a rank that refuses its arguments cannot know at which gate of the call the others wait.
        for r, payload in enumerate(arrived):
            if "error" in payload and payload["op"] == op and r != self.rank:
                raise MoEError(f"{op}: {phase}: rank {r} refused its arguments: {payload['error']}")
        for r, payload in enumerate(arrived):
            if (payload["op"], payload["phase"]) != (op, phase):
                raise MismatchError(
                    f"{op}: {phase}: expected the same call on all ranks, got {op} {phase} on rank {self.rank} and "
                    f"{payload['op']} {payload['phase']} on rank {r}"
                )

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Waits for `keys` in the store; False if some are missing. A broken store raises in `check`."""
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except Exception:  # stores raise different classes when the time is up
            return self._store.check(keys)
        return True

    def _get(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]

    # -- failures -----------------------------------------------------------------------------------------------------

    def transport_failed(self, op: str, phase: str, error: Exception) -> NoReturn:
        """A collective raised: finds out which ranks still live, and raises `GroupError` naming the others."""
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        self.broken = True
        try:
            self._store.set(self._key("roll", self.rank), "here")
            self._store.set(self._key("suspect"), text)
            keys = [self._key("roll", r) for r in range(self.ranks)]
            deadline = time.monotonic() + min(_ROLL_CALL, get_timeout())
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL)
            missing = [r for r in range(self.ranks) if not self._store.check([keys[r]])]
        except Exception:
            self._fail(
                op, phase, f"the transport and the group's store failed; its host, usually rank 0, died ({text})"
            )
        who = f"{_ranks_text(missing)} no longer answers" if missing else "a connection broke, all ranks answer"
        self._fail(op, phase, f"{who} ({text})")

    def raise_if_reported(self, op: str, phase: str, in_collective: bool = False) -> None:
        """Raises `GroupError` if a rank has failed; `in_collective`: one is in flight here and will never end."""
        if self._store.check([self._key("failure")]):
            report = self._store.get(self._key("failure")).decode()
            self._failure = report
            self.broken = self.broken or in_collective
            raise GroupError(f"{op}: {phase}: group {self.name} failed: {report}")
        if self._store.check([self._key("suspect")]):
            self._store.set(self._key("roll", self.rank), "here")

    def fail(self, message: str) -> None:
        """Marks the group as unusable until `rebuild`, here and for ranks that come to a gate."""
        if self._failure is None:
            self._record_failure(message)

    def _record_failure(self, message: str) -> None:
        self._failure = message
        with contextlib.suppress(Exception):
            # The first report stands: a rank that is told of a failure must not become its cause.
            if not self._store.check([self._key("failure")]):
                self._store.set(self._key("failure"), message)

    def _fail(self, op: str, phase: str, message: str) -> NoReturn:
        self._record_failure(f"{op}: {phase}: {message}")
        raise GroupError(
            f"{op}: {phase}: group {self.name}: {message}; the group is unusable until every rank calls rebuild"
        )

    def rebuild(self) -> None:
        """Makes a failed group usable again; every rank must call it. The agreed capacities are forgotten.

        Raises:
            GroupError: a rank did not come in time; the group is as before, and the call can be repeated. Or, on every
                rank: a collective was left unfinished on some rank, and only a new process group helps.
        """
        if self.peer is not None:
            torch.cuda.synchronize(self.peer.device)
            forget_pending(self.peer.device, GroupError)  # it speaks of what is repaired here
        with self._lock:
            try:
                self._epoch, broken = self._agree_on_epoch()
            except MoEError:
                raise
            except Exception as error:
                raise GroupError(f"rebuild: route: group {self.name}: the group's store failed ({error})") from error
            self._gates, self._failure = 0, None
            # Every rank has waited for its own launches before it came here.
            self.peer = None
            self.outgrown.clear()
            self.max_tokens = self.row_capacity = None
            if broken:
                self._failure = f"rebuild: route: a collective was left unfinished on {_ranks_text(broken)}"
                raise GroupError(f"{self._failure}; make a new process group instead of {self.name}")

    def _agree_on_epoch(self) -> tuple[int, list[int]]:
        """Meets the other ranks for a new epoch; returns it and the ranks whose process group is broken.

        A rank asks for an epoch that nobody has asked for yet, and those that wait follow the highest. Requests are
        never withdrawn: one of a rank that gave up is passed over by the next one that comes. So it does not matter how
        often each rank has tried.
        """
        timeout = get_timeout()
        keys = [f"moe/{self.name}/{self._life}/rebuild/{r}" for r in range(self.ranks)]

        def requests() -> dict[int, tuple[int, bool]]:
            return {r: json.loads(self._store.get(k)) for r, k in enumerate(keys) if self._store.check([k])}

        deadline = time.monotonic() + timeout
        wanted = 1 + max(self._epoch, *(epoch for epoch, _ in requests().values()), 0)
        while True:
            self._store.set(keys[self.rank], json.dumps((wanted, self.broken)))
            found = requests()
            highest = max(epoch for epoch, _ in found.values())
            missing = [r for r in range(self.ranks) if r not in found or found[r][0] < highest]
            if not missing:
                return wanted, [r for r, (_, broken) in found.items() if broken]
            if highest == wanted:
                if time.monotonic() >= deadline:
                    who = _ranks_text(missing)
                    raise GroupError(f"rebuild: route: group {self.name}: {who} did not arrive within {timeout:g} s")
                time.sleep(_POLL)
            wanted = highest


def _ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_groups: dict[str, Group] = {}


def group_ranks(group_name: str) -> int:
    """The number of ranks of a group; 1 for the empty name."""
    return 1 if group_name == "" else _resolve(group_name).size()


def group_rank(group_name: str) -> int:
    """This process's rank in the group; 0 for the empty name."""
    return 0 if group_name == "" else _resolve(group_name).rank()


def get_group(group_name: str) -> Group:
    """The state of a group of two or more ranks, made at first use."""
    pg = _resolve(group_name)
    group = _groups.get(group_name)
    if group is None or group.pg is not pg:
        _forget_destroyed()
        group = _groups[group_name] = Group(group_name, pg)
    return group


def _forget_destroyed() -> None:
    """Gives back what groups hold whose process groups are gone."""
    for name, group in list(_groups.items()):
        if group.pg is None:
            if group.peer is not None:
                torch.cuda.synchronize(group.peer.device)
            del _groups[name]


def _resolve(group_name: str) -> dist.ProcessGroup:
    try:
        c10d: Any = dist.distributed_c10d
        return c10d._resolve_process_group(group_name)
    except Exception as error:
        raise ValueError(
            f"dispatch_gemm_combine: group_name: expected the group_name of a live process group, got {group_name!r}"
        ) from error
