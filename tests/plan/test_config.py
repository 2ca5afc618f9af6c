"""What configurations are refused, with which words; that names here and in the headers agree; fakes; host time."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import pytest
import torch
from tests.plan.cases import Case, make_case

from moe_megakernel import plan_names
from moe_megakernel.plan import CONFIG_FIELDS, RECORD_COLUMNS, ROW_TILE, Edge, GradNeeds, PlanConfig, Problem, make_plan
from moe_megakernel.plan_names import Direction
from moe_megakernel.simulate.costs import BIAS_COLUMNS

HEADERS = Path(__file__).parents[2] / "kernels" / "include" / "moe" / "plan"
BIG = 2**31 - 1


def changed(config: PlanConfig, **values: int) -> PlanConfig:
    """The configuration with fields replaced, whichever part they are in."""
    for part in ("problem", "tiling", "schedule"):
        own = {k: v for k, v in values.items() if hasattr(getattr(config, part), k)}
        config = replace(config, **{part: replace(getattr(config, part), **own)})
    return config


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(11)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_ranks", 0, r"num_ranks in \[1, 4096\], got 0"),
        ("rank", -1, r"rank in \[0, 4095\], got -1"),
        ("rank", 4000, r"rank < num_ranks = \d+, got 4000"),
        ("num_experts", 0, r"num_experts in \[1, \d+\], got 0"),
        ("num_experts", 2**26, r"num_experts in \[1, 33554431\], got 67108864"),
        ("top_k", 0, r"top_k in \[1, \d+\], got 0"),
        ("hidden", 0, r"hidden in \[1, 1048576\], got 0"),
        ("width", -7, r"width in \[1, 1048576\], got -7"),
        ("gated", 2, r"gated in \[0, 1\], got 2"),
        ("max_tokens", -1, r"max_tokens in \[0, \d+\], got -1"),
        ("max_tokens", BIG, rf"max_tokens \* top_k <= {BIG} with top_k = \d, got {BIG}"),
        ("row_capacity", -1, r"row_capacity in \[0, \d+\], got -1"),
        ("row_capacity", 2**31, rf"row_capacity in \[0, {BIG}\], got 2147483648"),
        ("row_capacity", 5, r"row_capacity >= \d+, the rows that arrive at rank \d, got 5"),
        ("act_columns", 64, r"act_columns a multiple of 128 in \[128, 1048576\], got 64"),
        ("dgrad_columns", 192, r"dgrad_columns a multiple of 128 in \[128, 1048576\], got 192"),
        ("act_columns", 200, r"act_columns a multiple of 128 in \[128, 1048576\], got 200"),
        ("hidden_columns", 0, r"hidden_columns in \[1, 1048576\], got 0"),
        ("wgrad_rows", 0, r"wgrad_rows in \[16, 1048576\], got 0"),
        ("wgrad_columns", 0, r"wgrad_columns in \[16, 1048576\], got 0"),
        ("piece_rows", 0, r"piece_rows in \[1, 128\], got 0"),
        ("piece_rows", 48, "piece_rows a divisor of 128, got 48"),
        ("piece_rows", 256, r"piece_rows in \[1, 128\], got 256"),
        ("combine_tokens", 0, rf"combine_tokens in \[1, {BIG}\], got 0"),
        ("num_clusters", 0, r"num_clusters in \[1, 1048576\], got 0"),
        ("waves", 0, r"waves in \[1, 1048576\], got 0"),
        ("segment_tiles", 0, r"segment_tiles a multiple of 2 in \[2, 1048576\], got 0"),
        ("segment_tiles", 3, r"segment_tiles a multiple of 2 in \[2, 1048576\], got 3"),
        ("wgrad_tiles", 3, r"wgrad_tiles a multiple of 2 in \[2, 1048576\], got 3"),
        ("lag", -1, r"lag in \[0, 1048576\], got -1"),
        ("x_slots", -1, r"x_slots in \[0, 1048576\], got -1"),
        ("x_slots", 1, r"x_slots >= \d+ \(or 0: as many as needed\), got 1"),
        ("a_slots", 1, r"a_slots >= \d+ \(or 0: as many as needed\), got 1"),
        ("separate_stages", 2, r"separate_stages in \[0, 1\], got 2"),
    ],
)
def test_refused_fields(case: Case, field: str, value: int, expected: str) -> None:
    config = changed(case.config, **{field: value})
    with pytest.raises(RuntimeError, match=f"moe::plan_tables: config: expected {expected}"):
        make_plan(config, case.class_counts, case.tokens)


def test_too_many_tasks(case: Case) -> None:
    config = changed(case.config, hidden=2**20, hidden_columns=1, row_capacity=BIG)
    with pytest.raises(RuntimeError, match=rf"config: expected tiles large enough for at most {BIG} tasks, got \d+"):
        make_plan(config, case.class_counts, case.tokens)


def test_too_many_pull_tickets(case: Case) -> None:
    config = changed(case.config, piece_rows=1, row_capacity=BIG)
    with pytest.raises(RuntimeError, match=rf"config: expected piece_rows large enough for at most {BIG} pull tick"):
        make_plan(config, case.class_counts, case.tokens)


def test_small_rings_are_no_matter_in_backward(case: Case) -> None:
    make_plan(changed(case.config, x_slots=1, a_slots=1), case.class_counts, case.tokens, Direction.BACKWARD)


def test_refused_tensors(case: Case) -> None:
    counts, tokens, config = case.class_counts, case.tokens, case.config.tensor()
    ranks, experts, _ = counts.shape

    def refused(message: str, *arguments: object) -> None:
        with pytest.raises(RuntimeError, match=f"moe::plan_tables: {message}"):
            torch.ops.moe.plan_tables(*arguments)

    refused("config: expected a contiguous int64 tensor of 24 element", counts, tokens, config[:-1].clone(), 0, 0)
    refused("config: expected a contiguous int64 tensor", counts, tokens, config.int(), 0, 0)
    refused(r"direction: expected 0 \(forward\) or 1 \(backward\), got 2", counts, tokens, config, 2, 0)
    refused("needs: expected a mask of 7 bits, got 128", counts, tokens, config, 1, 128)
    refused("class_counts: expected a contiguous int32", counts.long(), tokens, config, 0, 0)
    shape = rf"\[{ranks}, {experts}, 64\]"
    more = torch.cat([counts, counts[:, :1]], 1)
    refused(rf"class_counts: expected shape {shape} as config says, got \[", more, tokens, config, 0, 0)
    refused(f"tokens: expected a contiguous int64 tensor of {ranks} elem", counts, tokens[:-1].clone(), config, 0, 0)
    most = case.config.problem.max_tokens
    refused(rf"tokens: expected 0 to {most} \(max_tokens\), got {most + 1} for", counts, tokens + 1, config, 0, 0)
    refused("class_counts: expected at most 0 routes", counts, torch.zeros_like(tokens), config, 0, 0)


def read_enums(text: str) -> dict[str, dict[str, int]]:
    """Enums of a header: name -> {kEnumerator: value}."""
    text = re.sub(r"//.*", "", text)
    enums = {}
    for name, body in re.findall(r"enum class (\w+)[^{;]*\{(.*?)\}", text, re.DOTALL):
        values: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in body.split(","))):
            key, _, value = (part.strip() for part in item.partition("="))
            values[key] = int(value) if value else len(values)
        enums[name] = values
    return enums


def constant_name(name: str) -> str:
    """kFlagReady -> FLAG_READY."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.removeprefix("k")).upper()


ALL_TEXT = "".join(path.read_text() for path in sorted(HEADERS.glob("*.h")))


def test_enums_are_those_of_the_headers() -> None:
    enums = read_enums(ALL_TEXT)
    ours = {n: e for n, e in vars(plan_names).items() if isinstance(e, type) and issubclass(e, IntEnum) and len(e)}
    for name, enum in ours.items():
        expected = {constant_name(key): value for key, value in enums[name].items()}
        assert {member.name: member.value for member in enum} == expected, name
    assert {"TaskKind", "Direction", "Counter", "Role", "Proxy", "Scope", "Stream", "Region"} <= set(ours)
    fences = re.findall(r"std::int32_t k(NoFence|BulkWait|LoadsDone|ProxyFence) = (\d+);", ALL_TEXT)
    assert {constant_name(name): int(value) for name, value in fences} == {
        name: int(member) for name, member in plan_names.Fence.__members__.items()
    }
    for constant, enum in [("kNumTaskKinds", "TaskKind"), ("kNumCounters", "Counter"), ("kNumRegions", "Region")]:
        assert re.findall(rf"{constant} = (\d+);", ALL_TEXT) == [str(len(enums[enum]))]


def test_fields_are_those_of_the_headers() -> None:
    def struct_fields(name: str) -> list[str]:
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", ALL_TEXT, re.DOTALL)
        assert body is not None
        return re.findall(r"^  (?:std::\w+|Counter|Role|Proxy|Scope|bool) (\w+);", body[1], re.MULTILINE)

    expected = [name for struct in ("Problem", "Tiling", "Schedule") for name in struct_fields(struct)]
    assert list(CONFIG_FIELDS) == expected == re.findall(r'^    \{"(\w+)", ', ALL_TEXT, re.MULTILINE)
    assert list(Edge._fields) == struct_fields("Edge")
    assert list(GradNeeds._fields) == struct_fields("GradNeeds")
    assert re.findall(r"kRowTile = (\d+);", ALL_TEXT) == [str(ROW_TILE)]
    assert re.findall(r"kBiasColumns = (\d+);", ALL_TEXT) == [str(BIAS_COLUMNS)]
    assert re.findall(r"kNumGradNeeds = (\d+);", ALL_TEXT) == [str(len(GradNeeds._fields))]
    assert re.findall(r"kRecordColumns = (\d+);", ALL_TEXT) == [str(len(RECORD_COLUMNS))]


@pytest.mark.parametrize("direction", [0, 1])
def test_fakes(case: Case, direction: int) -> None:
    config = case.config.tensor()
    calls = [
        (torch.ops.moe.plan_tables, (case.class_counts, case.tokens, config, direction, 127)),
        (torch.ops.moe.plan_layout, (config, 2)),
        (torch.ops.moe.plan_edges, (config,)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_planning_a_rank_of_72_takes_less_than_a_second() -> None:
    """384 experts, 2048 tokens a rank, 8 routes a token: the order of 10 ms on a desktop core."""
    ranks, experts, tokens, top_k = 72, 384, 2048, 8
    config = PlanConfig(Problem(ranks, 0, experts, top_k, 7168, 2048, True, tokens, 2 * tokens * top_k))
    draws = [torch.randint(0, experts * 64, (tokens * top_k,)) for _ in range(ranks)]
    counts = torch.stack([torch.bincount(d, minlength=experts * 64) for d in draws]).view(ranks, experts, 64)
    times = []
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        begin = time.perf_counter()
        plan = make_plan(config, counts, torch.full((ranks,), tokens), direction)
        times.append(time.perf_counter() - begin)
        assert len(plan.tasks) > 1000
    assert min(times) < 1.0
