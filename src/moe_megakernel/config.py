"""Settings of the whole process: today the time a rank waits for its peers.

Read by `distributed.group`; set by users through `moe_megakernel.set_timeout` or the environment.
"""

from __future__ import annotations

import math
import os

#: Seconds. Longer than the skew between ranks that compile for the first time (135 s were seen in public reports).
DEFAULT_TIMEOUT = 600.0


def _from_environment() -> float:
    text = os.environ.get("MOE_MEGAKERNEL_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise ValueError(f"MOE_MEGAKERNEL_TIMEOUT: expected a number of seconds > 0, got {text!r}")
    return value


_timeout: float | None = None


def get_timeout() -> float:
    """Seconds that a rank waits for its peers before it raises `GroupError`.

    Default 600, or the environment variable MOE_MEGAKERNEL_TIMEOUT.
    """
    return _from_environment() if _timeout is None else _timeout


def set_timeout(seconds: float) -> None:
    """Sets the seconds that a rank waits for its peers; the same value on every rank is advised.

    Raises:
        ValueError: `seconds` is not a finite number above 0.
    """
    global _timeout
    if not seconds > 0 or math.isinf(seconds):
        raise ValueError(f"set_timeout: seconds: expected a finite number > 0, got {seconds}")
    _timeout = float(seconds)
