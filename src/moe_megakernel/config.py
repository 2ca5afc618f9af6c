"""Settings of the whole process: how long to wait, and how much of a GPU the kernels may take.

The timeout is read by `distributed.group` and, like the number of SMs, by `hopper.launch`; both are set by users
through the functions here or the environment.
"""

from __future__ import annotations

import math
import os
from typing import Any

from . import contexts

#: Seconds. Longer than the skew between ranks that compile for the first time (135 s were seen in public reports).
DEFAULT_TIMEOUT = 600.0


_TIMEOUT = os.environ.encodekey("MOE_MEGAKERNEL_TIMEOUT")
_NUM_SMS = os.environ.encodekey("MOE_MEGAKERNEL_NUM_SMS")


def _is_set(key: Any) -> bool:
    """Whether the environment has an encoded key. Every launch asks: the public look-up takes ten times as long."""
    return key in os.environ._data  # type: ignore[attr-defined]


def _from_environment() -> float:
    text = os.environ.get("MOE_MEGAKERNEL_TIMEOUT", "") if _is_set(_TIMEOUT) else ""
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
    """Seconds that a rank waits for its peers before it raises `GroupError`, and a kernel's block for another block.

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
    contexts.forget()


def _sms_from_environment() -> int | None:
    text = os.environ.get("MOE_MEGAKERNEL_NUM_SMS", "") if _is_set(_NUM_SMS) else ""
    if not text:
        return None
    if not text.isdecimal() or int(text) < 2 or int(text) % 2:
        raise ValueError(f"MOE_MEGAKERNEL_NUM_SMS: expected an even number >= 2, got {text!r}")
    return int(text)


_num_sms: int | None = None


def get_num_sms() -> int | None:
    """Streaming multiprocessors (SMs) that the kernels take at most, or None: all that the device has.

    Default None, or the environment variable MOE_MEGAKERNEL_NUM_SMS.
    """
    return _sms_from_environment() if _num_sms is None else _num_sms


def set_num_sms(count: int | None) -> None:
    """Sets how many SMs the kernels take at most, so that work on other streams finds room. Results stay the same.

    Args:
        count: even, because blocks work in pairs; more than the device has means all; None for the default.

    Raises:
        ValueError: `count` is odd or below 2.
    """
    global _num_sms
    if count is not None and (count < 2 or count % 2):
        raise ValueError(f"set_num_sms: count: expected an even number >= 2 or None, got {count}")
    _num_sms = count
    contexts.forget()
