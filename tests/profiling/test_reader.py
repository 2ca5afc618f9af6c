"""The stream of events: any chunk size gives what `json` gives, every damaged or foreign file gives one clear error."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.profiling.handmade import Trace, training_step

from moe_megakernel.profiling import ProfileError, json_stream
from moe_megakernel.profiling.reader import read_trace

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\{}[]\u00e9\n,:', max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXTS = st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}])


def events_of(path: Path, chunk: int) -> list[Any]:
    text = json_stream.Text(path, chunk)
    try:
        assert text.peek() == "["
        found = list(json_stream.items(text))
        assert text.peek() == ""
    finally:
        text.close()
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(VALUES, max_size=5), form=TEXTS, chunk=st.integers(1, 40), zipped=st.booleans())
def test_any_chunk_gives_the_same_values(tmp_path, values, form, chunk, zipped):
    data = f" \n{json.dumps(values, **form)} ".encode("utf-8", "surrogatepass")
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert events_of(path, chunk) == values


@pytest.mark.parametrize("chunk", range(1, 12))
def test_words_and_numbers_at_the_border_of_chunks(tmp_path, chunk):
    words = '[NaN, -Infinity, Infinity, 1.5e-7, -12.25E+3, true, false, null, "\\u00e9\\ud83d\\ude00", 0, -0.5]'
    path = tmp_path / "words"
    path.write_text(words)
    first, *rest = events_of(path, chunk)
    assert math.isnan(first)
    assert rest == json.loads(words)[1:]


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
def test_trace_is_the_same_in_any_chunks(tmp_path, chunk):
    path = training_step().write(tmp_path / "trace.json")
    one, other = read_trace(path), read_trace(path, chunk=chunk)
    assert one.names == other.names
    assert (one.rank, one.world_size) == (other.rank, other.world_size) == (0, 2)
    for columns, others in zip(
        (one.device, one.calls, one.ranges), (other.device, other.calls, other.ranges), strict=True
    ):
        assert len(columns) == len(others) > 0
        assert (columns["start"] == others["start"]).all()
        assert (columns["name"] == others["name"]).all()


def test_names_with_braces_quotes_and_control_characters(tmp_path):
    name = 'void k<{"a": [1]}>(\\"x\\") \u00e9 ]}'
    trace = Trace()
    trace.kernel(name, 0, 5)
    path = trace.write(tmp_path / "trace.json")
    path.write_text(path.read_text().replace("traceName", "a\tb"))  # a raw tab, which strict JSON forbids
    assert read_trace(path).names == [name]


@pytest.mark.parametrize(
    ("ts", "dur", "expected"),
    [
        (1_600_000_000_000_000, 3, 3000),  # microseconds since 1970, as older traces have
        (1_600_000_000_000_000.25, 0.75, 750),
        (5_369_339_991_152.727, 0.001, 1),
        (0.0, -1, 0),  # Kineto writes a negative length for what had not ended
    ],
)
def test_times_are_nanoseconds(tmp_path, ts, dur, expected):
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "pid": 0, "tid": 7}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    device = read_trace(path).device
    assert device["end"][0] - device["start"][0] == expected


def test_events_without_usable_times_are_left_out(tmp_path):
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": [1]}
    bad = [{**good, "ts": ts} for ts in (math.nan, None, "1", 1e300)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([*bad, good, {**good, "dur": math.inf}]))
    assert len(read_trace(path).ops) == 1


def test_bare_array_and_byte_order_mark(tmp_path):
    path = tmp_path / "trace_rank12.json"
    path.write_text("\ufeff" + json.dumps(training_step().document()["traceEvents"]))
    trace = read_trace(path)
    assert len(trace.device) == 2 * 13 + 1
    assert trace.rank == 12, "from the name, because the array has no distributedInfo"


def test_gzip_is_told_by_content(tmp_path):
    path = training_step().write(tmp_path / "trace.json.gz")
    plain = path.rename(tmp_path / "trace.json")
    assert len(read_trace(plain).device) == 2 * 13 + 1


def test_progress_counts_bytes_of_the_file(tmp_path):
    path = training_step().write(tmp_path / "trace.json.gz")
    seen: list[int] = []
    read_trace(path, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


GOOD = json.dumps(training_step().document())
FOREIGN = {
    "empty": (
        "",
        "expected a trace of torch.profiler (an object with traceEvents, or a list of events), got an empty file",
    ),
    "spaces": (" \n ", "got an empty file"),
    "cut": (GOOD[:3000], "expected a whole trace, got one that is cut off after 19 events"),
    "cut-in-name": (GOOD[: GOOD.index("flash_fwd") + 4], "expected a whole trace, got one that is cut off after "),
    "cut-behind-event": (
        GOOD[: GOOD.index("}}, {") + 2],
        "expected a whole trace, got one that is cut off after 1 events",
    ),
    "cut-number": ('[{"ph": "X", "ts": -', "expected a whole trace, got one that is cut off after 0 events"),
    "cut-word": ('{"a": tr', "expected a whole trace, got one that is cut off after 0 events"),
    "package": ('{"name": "x", "version": "1", "a": 1, "b": 2, "c": 3}', "got an object with name, version, a, b, ..."),
    "nothing": ("{}", "got an empty object"),
    "number": ("12", "got a JSON number"),
    "text": ('"trace"', "got a JSON string"),
    "numbers": ("[1, 2]", "expected a list of trace events, got a number as element 0"),
    "lists": ("[[]]", "expected a list of trace events, got a list as element 0"),
    "records": ('[{"id": 1}]', "expected a list of trace events, each with ph, got an element 0 with id"),
    "no-list": ('{"traceEvents": {"a": 1}}', "expected a list in traceEvents, got a object"),
    "no-json": ("hello world, this is no trace at all but a text of some length", "expected JSON, got 'hello world"),
    "no-comma": ('[{"ph": "M"} {"ph": "M"}]', "expected JSON, got "),
    "no-key": ("{traceEvents: []}", "expected JSON, got "),
    "behind": (GOOD + "{}", "expected one JSON document, got '{}' behind it"),
    "no-events": ('{"traceEvents": []}', "expected kernels or CPU ops, got 0 events of other kinds"),
    "stacks": ('[{"ph": "X", "cat": "python_function", "ts": 1, "dur": 1}]', "got 1 events of other kinds"),
    "deep": ("[" * 100_000, "got values nested too deeply"),
}


@pytest.mark.parametrize(("text", "message"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_foreign_and_damaged_files(tmp_path, text, message, chunk):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_trace(path, chunk=chunk)
    assert str(caught.value).startswith(f"profile: {path}: expected ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(GOOD.encode())[:-200], "expected a whole gzip file, got one that is cut off"),
        (gzip.compress(GOOD.encode())[:300] + b"damage" * 50, "expected a whole gzip file, got a damaged one ("),
        (b"\x1f\x8b", "expected a whole gzip file, got "),
        (GOOD.encode("utf-16"), "expected UTF-8 text, got byte 0xff"),
        (GOOD.encode().replace(b"warm_up", b"warm\xff"), "expected UTF-8 text, got byte 0xff"),
        ('["\u00e9'.encode()[:-1], "expected a whole trace, got one that is cut off"),
        (b"\0" * 100, "expected JSON, got "),
    ],
    ids=["gzip-cut", "gzip-damaged", "gzip-head", "utf-16", "not-utf-8", "cut-character", "zeros"],
)
def test_damaged_bytes(tmp_path, data, message):
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(ProfileError) as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.json: expected a trace file, got no such file") as caught:
        read_trace(tmp_path / "none.json")
    assert caught.value.exit_code == 2
    with pytest.raises(ProfileError, match="expected a readable file, got Is a directory"):
        read_trace(tmp_path)


def test_a_value_without_end_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "LARGEST_VALUE", 1000)
    path = tmp_path / "trace.json"
    path.write_text('{"blob": "' + "x" * 100_000)
    with pytest.raises(ProfileError, match="expected values of at most 1000 characters, got a longer one"):
        read_trace(path, chunk=100)
