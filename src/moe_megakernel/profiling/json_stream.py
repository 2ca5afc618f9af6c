"""Reads a trace file as a stream: bytes to text to one event after the other, never the whole file.

Standard `json` parses a document at once, which for a trace of a gigabyte takes ten. Here the text passes through a
buffer of about one chunk, from which `json`'s own scanner takes single values: an event is small, and the scanner is C.
`reader.py` calls `events`.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ProfileError

#: Bytes read at a time, after decompression.
CHUNK = 1 << 20
#: Longest single value (an event, or a member of the trace's head), characters. Kineto's are below a megabyte.
LARGEST_VALUE = 1 << 26
# A number or a word at the end of the buffer may go on in the next chunk; none is as long as this.
_MARGIN = 64
_SPACE = " \t\n\r"
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_NUMBER_TAIL = re.compile(r"[.eE][-+]?|-")


class Truncated(Exception):
    """The text ends inside a value."""


class Text:
    """The decoded text of a file, a growing and shrinking window of it.

    Args:
        path: plain or gzip (told by content, not by name), UTF-8.
        chunk: bytes read at a time.
        progress: called with the bytes of the file that have been read so far.
    """

    def __init__(self, path: Path, chunk: int = CHUNK, progress: Callable[[int], None] | None = None) -> None:
        self.path, self._chunk, self._progress = path, chunk, progress
        self._raw: BinaryIO = path.open("rb")
        magic = self._raw.read(2)
        self._raw.seek(0)
        self.zipped = magic == b"\x1f\x8b"
        self._bytes: Any = gzip.GzipFile(fileobj=self._raw) if self.zipped else self._raw
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.buffer, self.at, self.ended = "", 0, False
        self.more()
        if self.buffer.startswith("\ufeff"):
            self.at = 1

    def close(self) -> None:
        self._raw.close()

    def more(self) -> bool:
        """Drops what has been consumed and appends a chunk; False at the end of the file."""
        if self.ended:
            return False
        left = self.buffer[self.at :]
        # A value that does not fit is scanned again from its start: doubling keeps that linear.
        data = self._read(max(self._chunk, len(left)))
        self.ended = not data
        try:
            self.buffer = left + self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            if self.ended:
                raise Truncated from None  # inside a character
            raise ProfileError(self.path, "UTF-8 text", f"byte 0x{error.object[error.start]:02x}") from None
        self.at = 0
        if self._progress is not None:
            self._progress(self._raw.tell())
        return not self.ended

    def _read(self, size: int) -> bytes:
        try:
            return self._bytes.read(size)
        except EOFError:
            raise ProfileError(self.path, "a whole gzip file", "one that is cut off") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ProfileError(self.path, "a whole gzip file", f"a damaged one ({error})") from None

    def peek(self) -> str:
        """The next character that is no white space, not consumed; "" at the end of the file."""
        while True:
            buffer, at = self.buffer, self.at
            while at < len(buffer) and buffer[at] in _SPACE:
                at += 1
            self.at = at
            if at < len(buffer):
                return buffer[at]
            if not self.more() and self.at >= len(self.buffer):
                return ""


_scan = json.JSONDecoder(strict=False).raw_decode  # kernels' names have been seen to hold raw control characters


def value(text: Text) -> Any:
    """The JSON value at the window's position, which is no white space; moves behind it.

    Raises:
        Truncated: the file ends inside it.
        json.JSONDecodeError: it is no JSON.
        ProfileError: it is longer than `LARGEST_VALUE`.
    """
    while True:
        try:
            found, end = _scan(text.buffer, text.at)
        except json.JSONDecodeError as error:
            if not _is_cut(text.buffer, error):
                raise
            if len(text.buffer) - text.at > LARGEST_VALUE:
                raise ProfileError(text.path, f"values of at most {LARGEST_VALUE} characters", "a longer one") from None
            if not text.more():
                raise Truncated from None
            continue
        # Only a closing bracket or quote says that a value has ended; a number might go on in the next chunk.
        if text.ended or text.buffer[end - 1] in '}]"' or len(text.buffer) - end >= _MARGIN:
            text.at = end
            return found
        text.more()


def _is_cut(buffer: str, error: json.JSONDecodeError) -> bool:
    """Whether the error says only that the buffer ends inside a string, a number, a word or between two values."""
    rest = buffer[error.pos :]
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\u"):
        return len(rest) <= len(r"\u0000")
    if len(rest) > _MARGIN:
        return not rest.strip(_SPACE)
    rest = rest.rstrip(_SPACE)
    return any(word.startswith(rest) for word in _WORDS) or _NUMBER_TAIL.fullmatch(rest) is not None


def items(text: Text) -> Iterator[Any]:
    """The elements of the array whose `[` is next; ends behind the `]`."""
    text.at += 1
    if _next(text) == "]":
        text.at += 1
        return
    while True:
        _next(text)
        yield value(text)
        mark = _next(text)
        text.at += 1
        if mark == "]":
            return
        _require(text, mark, ",", "a comma or the end of the list")


def members(text: Text) -> Iterator[str]:
    """The keys of the object whose `{` is next, each with the position at its value, which the caller consumes."""
    text.at += 1
    if _next(text) == "}":
        text.at += 1
        return
    while True:
        _require(text, _next(text), '"', "a key in quotes")
        key = value(text)
        _require(text, _next(text), ":", "a colon behind a key")
        text.at += 1
        _next(text)
        yield key
        mark = _next(text)
        text.at += 1
        if mark == "}":
            return
        _require(text, mark, ",", "a comma or the end of the object")


def _next(text: Text) -> str:
    mark = text.peek()
    if not mark:
        raise Truncated
    return mark


def _require(text: Text, got: str, wanted: str, words: str) -> None:
    if got != wanted:
        raise json.JSONDecodeError(f"expected {words}", text.buffer, max(text.at - 1, 0))
