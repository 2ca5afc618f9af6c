"""The docs' measured tables: made of the CSV files and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs_scripts import load_script

from moe_megakernel.bench.records import Row, append_rows

A = Row(
    **{"gpu": "h200", "driver": "580", "torch": "2.11", "date": "2026-12-02", "commit": "abc", "shape": "bench-a"},
    **{"T": 8192, "H": 2048, "I": 768, "E": 128, "K": 8, "ranks": 1, "routing": "uniform", "direction": "forward"},
    **{"mode": "eager", "cache": "cold", "impl": "mega", "variant": "", "version": "", "rounds": 20, "ms_median": 2.0},
    **{"ms_min": 1.9, "ms_max": 2.1, "tflops": 300.0, "ratio_dense": 0.5, "error": 0.004, "host_us": 200.0},
    **{"saved_bytes": 3 << 20, "workspace_bytes": 5, "peak_bytes": 7 << 20, "command": "moe-megakernel bench"},
)


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_script("results")


def test_pages_are_up_to_date(results: ModuleType) -> None:
    rows = results.all_rows()
    for page in results.PAGES:
        assert results.filled_in(page.read_text(), rows) == page.read_text(), "run: make docs"


def test_the_latest_row_counts(results: ModuleType, tmp_path: Path) -> None:
    append_rows(tmp_path / "h200" / "bench.csv", [A, replace(A, impl="dense"), replace(A, ms_median=1.0)])
    append_rows(tmp_path / "b200" / "bench.csv", [replace(A, gpu="b200")])
    found = [(row.gpu, row.impl, row.ms_median) for row in results.all_rows(tmp_path)]
    assert found == [("b200", "mega", 2.0), ("h200", "mega", 1.0), ("h200", "dense", 2.0)]


def test_what_others_publish_stands_apart(results: ModuleType) -> None:
    """Each with a source; the measured tables do not know it."""
    lines = results.published_table([A]).splitlines()[2:]
    assert len(lines) >= 4
    assert all("](https://" in line for line in lines)
    assert results.published_table([]) == results.published_table([A])
    measured = [block(results.all_rows()) for name, block in results.BLOCKS.items() if name != "published"]
    assert not any("LigerCute" in text for text in measured)


def test_tables(results: ModuleType, tmp_path: Path) -> None:
    rows = [
        A,
        replace(A, impl="sonic", ms_median=3.0, tflops=200.0),
        replace(A, impl="dense", ms_median=1.0, tflops=600.0, saved_bytes=-1, peak_bytes=-1),
        replace(A, shape="bench-d", ms_median=8.0, tflops=700.0),
        replace(A, shape="bench-d", impl="sonic", ms_median=8.8, commit="other"),
        replace(A, mode="graph", ms_median=1.5),
        replace(A, shape="qwen3-30b", T=4096, tflops=111.0),
        replace(A, shape="qwen3-30b", T=2048, tflops=99.0),
        replace(A, shape="qwen3-30b", T=2048, tflops=55.0, ms_median=3.6, impl="liger"),
    ]
    assert results.headline(rows).splitlines() == [
        "| forward, uniform: TFLOP/s | A | D |",
        "| --- | --- | --- |",
        "| `mega` | 300 (2.000 ms) | 700 (8.000 ms) |",
        "| `sonic` | 200 (3.000 ms) | 300 (8.800 ms) |",
        "| `dense` | 600 (1.000 ms) | - |",
        "| mega / sonic | **1.50** | - |",  # another run
        "| mega / dense | **0.50** | - |",
    ]
    assert "commit other: `moe-megakernel bench`" in results.rate_tables(rows)
    lines = results.token_table(rows).splitlines()
    assert lines[0] == "| qwen3-30b, forward, uniform: TFLOP/s at T | 2048 | 4096 |"
    assert lines[2:5] == ["| `mega` | 99 | 111 |", "| `liger` | 55 | - |", "| mega / liger | **1.80** | - |"]
    at_four = [*rows, replace(A, T=4096, tflops=333.0)]
    assert results.token_table(at_four).splitlines()[2] == "| `mega` | 333 | 300 |", "named shapes, too"
    assert "| H200 | A | `mega` | 200 | 3 | 7 |" in results.step_table(rows)
    assert "| H200 | A | 8192 | forward | `mega` | 2.000 | - | 1.500 |" in results.mode_table(rows)
    page = "a\n<!-- results modes -->\nold\n<!-- end -->\nb\n<!-- results tokens -->\n<!-- end -->\n"
    assert results.filled_in(page, []) == page.replace("old\n", "")
    new = results.filled_in(page, rows)
    assert "old" not in new
    assert new.count("| `mega` | 99 | 111 |") == 1
    with pytest.raises(KeyError):
        results.filled_in("<!-- results nothing -->\n<!-- end -->", rows)
    (picture,) = results.draw(rows, tmp_path)
    assert picture.name == "results-h200-forward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
