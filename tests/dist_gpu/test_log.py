"""Every claim, wait and raise of several ranks' launches follows their plans: the proof is about the kernel."""

from __future__ import annotations

import pytest
import torch
from tests.dist_gpu.layers import Layer, check_bits, one_rank, reserve_for, way
from tests.distributed.pool import Pool
from tests.distributed.split import share_of
from tests.distributed.worker import Rank
from tests.gpu.hooks import check_launch, logged, read_log
from tests.proof import library

from moe_megakernel.distributed.group import get_group
from moe_megakernel.hopper.launch import LaunchSizes, num_sms_for
from moe_megakernel.hopper.testing import group_plan_config
from moe_megakernel.plan import GradNeeds
from moe_megakernel.plan_names import Counter, Direction

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

LAYERS = {
    "uniform": Layer(640, 9, 4, 136, 200, routing={"zipf": 1.0, "drop": 0.1}, options={"bias": True}),
    "fewer experts than ranks": Layer(64, 3, 1, 64, 40),
}


def check_log(rank: Rank, name: str) -> None:
    whole, tokens = LAYERS[name].batch(rank)
    library.load()
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    check_bits(rank, whole, tokens, "mega", expected=expected)
    mine = share_of(rank.rank, tokens, whole.num_experts).inputs(whole)
    state = get_group(rank.name)
    _, columns, hidden = whole.w_gate_up.shape
    width, top_k = whole.w_down.shape[2], whole.topk_idx.shape[1]
    sms = num_sms_for(rank.device.index or 0)
    sizes = LaunchSizes(len(mine.x), top_k, whole.num_experts, hidden, width, columns != width, False, sms)
    for direction in Direction:
        leaves = mine.leaves()
        options = {"group_name": rank.name, "transport": way(rank).transport, "backend": "mega"}
        with logged(direction) as logs:
            for _ in range(2):
                y = leaves.call(**options)
                offsets = y.grad_fn.saved_tensors[9]  # expert_offsets
                y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
        config = group_plan_config(
            sizes,
            num_ranks=rank.ranks,
            rank=rank.rank,
            max_tokens=state.max_tokens,
            row_capacity=state.row_capacity,
            direction=direction,
        )
        assert len(logs) == 2
        biased = whole.bias_down is not None
        needs = GradNeeds(bias_gate_up=biased, bias_down=biased)
        for log in logs:
            records = read_log(log)
            fault = check_launch(records, mine, offsets, direction, needs, config)
            assert fault == "", f"rank {rank.rank}, {direction.name.lower()}: {fault}"
            flags = records[(records[:, 2] == 2) & (records[:, 4] == Counter.PEER_DONE)]
            assert sorted(flags[:, 5].tolist()) == list(range(rank.ranks))


@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("name", LAYERS)
def test_launches_follow_their_plans(pool: Pool, name: str) -> None:
    pool.run(check_log, name)
