"""Names of what plans are made of: tasks, counters, roles, regions, as they are numbered in `kernels/include/moe/plan`.

The headers are the source; a test reads them and compares. Used by `plan`, the simulator and the documentation.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class TaskKind(IntEnum):
    """Kinds of tasks, `plan/tasks.h`."""

    GATE_UP = 0
    DOWN = 1
    DOWN_DGRAD = 2
    ROUTE_GRAD = 3
    GATE_UP_DGRAD = 4
    WGRAD_DOWN = 5
    WGRAD_GATE_UP = 6
    CLOSE = 7
    DRAIN = 8
    DISPATCH = 9
    COMBINE = 10
    PLAN = 11
    BIAS_DOWN = 12
    BIAS_GATE_UP = 13


class Direction(IntEnum):
    """Forward or backward launch, `plan/tasks.h`."""

    FORWARD = 0
    BACKWARD = 1


class Counter(IntEnum):
    """Counters and flags, `plan/edges.h`."""

    PLAN_READY = 0
    X_READY = 1
    X_READ = 2
    A_READY = 3
    A_READ = 4
    DY_READY = 5
    DH_READY = 6
    EXPERT_DH = 7
    EXPERT_DY = 8
    EXPERT_X = 9
    STORED = 10
    PULLED = 11
    PEER_READY = 12
    PEER_DONE = 13


class Role(IntEnum):
    """Warp roles, `plan/edges.h`."""

    PLAN = 0
    PULL = 1
    LOAD = 2
    COMPUTE = 3


class Proxy(IntEnum):
    """Memory proxies, `plan/edges.h`."""

    GENERIC = 0
    ASYNC = 1


class Scope(IntEnum):
    """Scopes of releases and acquires, `plan/edges.h`."""

    GPU = 0
    SYSTEM = 1


class Fence(IntFlag):
    """Fences of an edge, `plan/edges.h`."""

    NO_FENCE = 0
    BULK_WAIT = 1
    LOADS_DONE = 2
    PROXY_FENCE = 4


class Stream(IntEnum):
    """Streams of tickets, `plan/records.h`."""

    COMPUTE = 0
    PULL = 1
    PLAN = 2


class Region(IntEnum):
    """Regions of the workspace, `plan/layout.h`."""

    FLAG_READY = 0
    HEADER = 1
    FLAG_DONE = 2
    ABORT = 3
    CLASS_COUNTS = 4
    ROUTE_ORDER = 5
    ROUTE_WEIGHTS = 6
    TOKENS = 7
    TOKENS_X = 8
    ROWS = 9
    ROUTE_GRADS = 10
    LAUNCH = 11
    PLAN_SIZES = 12
    TICKETS = 13
    COUNTERS = 14
    ALL_CLASS_COUNTS = 15
    MEETING = 16
    EXPERT_OFFSETS = 17
    ROW_SOURCES = 18
    ROW_WEIGHTS = 19
    ROW_TILES = 20
    SEGMENTS = 21
    MINIBATCH_ENDS = 22
    EXPERT_TILES = 23
    TASKS = 24
    PLAN_SCRATCH = 25
    X_RING = 26
    A_RING = 27
    DY_ROWS = 28
    X_ROWS = 29
    SCALED_A = 30
    DH = 31
    PARTIALS = 32
