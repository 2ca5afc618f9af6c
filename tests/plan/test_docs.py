"""The tables of docs/schedule.md are those that the plan gives, and plans without the library are refused in words."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.docs_scripts import load_script


def test_tables_are_up_to_date() -> None:
    tables = load_script("tables")
    page = tables.PAGE.read_text()
    assert tables.filled_in(page) == page, "run: python docs/tables.py"


def test_without_the_library_rows_are_planned_and_plans_refused() -> None:
    code = (
        "import torch\n"
        "from moe_megakernel import plan\n"
        "from moe_megakernel.distributed.exchange import plan_rows\n"
        "counts = torch.zeros(2, 3, 64, dtype=torch.int32)\n"
        "counts[1, 2, 5] = 2\n"
        "print(plan_rows(counts, [0, 7], 1).row_order.tolist())\n"
        "try:\n"
        "    plan.edges()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "MOE_MEGAKERNEL_LIBRARY": "/nowhere/lib.so"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    message = "plan: native library: expected it loaded, got no such file: /nowhere/lib.so"
    assert run.stdout.splitlines() == ["[0, 1]", message]
