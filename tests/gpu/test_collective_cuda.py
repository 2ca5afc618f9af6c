"""Expert parallelism with CUDA tensors: gloo ranks that share one GPU give the bits of one rank; errors come late."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import moe_megakernel
from moe_megakernel.testing import assert_equal_bits, make_inputs, random_routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS, EXPERTS, TOP_K = 37, 6, 3


def _rank(rank: int, ranks: int, store: str, backend: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    moe_megakernel.set_timeout(60)
    name = dist.group.WORLD.group_name
    whole = make_inputs(random_routing(TOKENS, EXPERTS, TOP_K, zipf=1.0, drop=0.1), 72, 40, EXPERTS, bias=True)
    whole = whole.to(torch.bfloat16, "cuda")
    dy = torch.randn(TOKENS, 72, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).cuda()
    bounds = [0, 5, TOKENS] if ranks == 2 else [TOKENS * r // ranks for r in range(ranks + 1)]
    mine = slice(bounds[rank], bounds[rank + 1])
    share = moe_megakernel.expert_range(EXPERTS, rank, ranks)
    held = slice(share.start, share.stop)

    def part(field: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[mine] if field in ("x", "topk_idx", "topk_weights") else tensor[held]

    fields = ("x", "topk_idx", "topk_weights", "w_gate_up", "w_down", "bias_gate_up", "bias_down")
    one, many = whole.leaves(), whole.leaves()
    for field in fields:
        local = part(field, getattr(whole, field)).clone()
        object.__setattr__(many, field, local.requires_grad_(field != "topk_idx"))
    y = one.call(backend="reference")  # as the ranks of a group
    y.backward(dy)
    options = {"group_name": name, "row_capacity": ranks * TOKENS * TOP_K, "backend": "reference"}
    z = many.call(**options)
    z.backward(dy[mine])
    assert_equal_bits(z, y[mine], "y")
    for field, grad in one.grads().items():
        assert_equal_bits(many.grads()[field], part(field, grad), field)

    if ranks > 1:
        if rank == 1:
            many.topk_idx[0, 0] = 77
        assert many.call(**options).isnan().all()
        with pytest.raises(moe_megakernel.RoutingError, match=r"got 77 at topk_idx\[0, 0\] on rank 1"):
            moe_megakernel.check_errors()
        if rank == 1:
            many.topk_idx[0, 0] = 0
        assert many.call(**options).isfinite().all()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (4, "gloo"), (1, "nccl")])
def test_ranks_on_one_gpu_give_the_bits_of_one_rank(ranks, backend, tmp_path):
    mp.spawn(_rank, args=(ranks, str(tmp_path / "store"), backend), nprocs=ranks)
