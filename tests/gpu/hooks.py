"""What tests ask of a launch beside its results: a signal left out, and the log of every claim, wait and raise.

The one place that knows `moe_megakernel.hopper.testing` and the format of a log on the device, see `plan/log.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from tests.proof.library import Log, check_log
from torch import Tensor

from moe_megakernel.hopper import testing
from moe_megakernel.hopper.testing import RECORD_WORDS
from moe_megakernel.plan import GradNeeds, PlanConfig
from moe_megakernel.plan_names import Counter, Direction, Role
from moe_megakernel.testing import LayerInputs

RAISE = 2
#: Computing warps of a block, each of which combines under a block number of its own.
WORKERS = 8


def fault(counter: Counter, index: int, direction: Direction = Direction.FORWARD) -> AbstractContextManager[None]:
    """Launches inside leave out every raise of one element of a counter."""
    return testing.fault(counter, index, direction)


def logged(direction: Direction = Direction.FORWARD) -> AbstractContextManager[Sequence[Tensor]]:
    """Launches inside each add their log to the sequence."""
    return testing.logged(direction)


def plan_config(inputs: LayerInputs, staged: bool = False, direction: Direction = Direction.FORWARD) -> PlanConfig:
    """The plan that a launch with these inputs uses, rings as they are."""
    (tokens, top_k), (experts, columns, hidden) = inputs.topk_idx.shape, inputs.w_gate_up.shape
    width = inputs.w_down.shape[2]
    sizes = {"tokens": tokens, "top_k": top_k, "num_experts": experts, "hidden": hidden, "width": width}
    return testing.plan_config(**sizes, gated=columns != width, staged=staged, direction=direction)


def read_log(words: Tensor) -> Tensor:
    """Records int64 [N, 8], as the checker takes them; an error where the log was too short."""
    words = words.cpu()
    count, capacity = int(words[0]), (len(words) - 1) // RECORD_WORDS
    assert count <= capacity, f"log: expected at most {capacity} records, got {count}"
    rows = words[1 : 1 + RECORD_WORDS * count].view(count, RECORD_WORDS)
    fields = rows[:, :3].contiguous().view(torch.int32).view(count, 6)
    return torch.cat([fields.long(), rows[:, 3:]], dim=1)


def check_launch(
    records: Tensor,
    inputs: LayerInputs,
    expert_offsets: Tensor,
    direction: Direction = Direction.FORWARD,
    needs: GradNeeds = GradNeeds(),  # noqa: B008  (immutable)
    config: PlanConfig | None = None,
) -> str:
    """Why the log of a launch is not what the plan prescribes, or "".

    Args:
        records: of `read_log`.
        inputs: of the launch, of a group this rank's.
        expert_offsets: of this rank's experts.
        direction: of the launch.
        needs: of a backward.
        config: of a group's launch; None for that of one rank.
    """
    block, role, event, counter, value = (records[:, column] for column in (0, 1, 2, 4, 6))
    num_blocks = int(block[role == Role.LOAD].max()) // 2 * 2 + 2
    (generation,) = value[(event == RAISE) & (counter == Counter.PLAN_READY)].tolist()
    launch = torch.tensor([direction, needs.mask(), inputs.x.shape[0], generation])
    config = config or plan_config(inputs, direction=direction)
    log = Log(records, config.tensor(), launch, expert_offsets.long().cpu())
    return check_log(log, num_blocks, WORKERS * num_blocks)
