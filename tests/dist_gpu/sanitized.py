"""Two ranks on one GPU for compute-sanitizer: `python -m tests.dist_gpu.sanitized` runs two small layers over them.

Forward and backward by both backends, their bits compared with one rank's. Prints one line a layer.
"""

from __future__ import annotations

from tests.dist_gpu.layers import Layer, check_bits, one_rank, reserve_for
from tests.distributed.pool import Pool
from tests.distributed.worker import Rank

import moe_megakernel

LAYERS = {
    "odd": Layer(150, 5, 3, 200, 72, routing={"zipf": 1.0, "drop": 0.2}, options={"bias": True}),
    "fewer experts than ranks": Layer(70, 1, 1, 72, 136, options={"activation": "relu2"}),
}
#: Seconds: the tools slow a kernel down a hundred times and more.
LIMIT = 540.0


def check(rank: Rank, name: str) -> None:
    """Steps of one layer."""
    moe_megakernel.set_timeout(LIMIT)
    moe_megakernel.set_num_sms(8)
    whole, tokens = LAYERS[name].batch(rank)
    reserve_for(rank, [(whole, tokens)])
    expected = one_rank(rank, whole)
    for backend in ("mega", "staged"):
        check_bits(rank, whole, tokens, backend, expected=expected)


def main() -> None:
    """Runs all layers."""
    pool = Pool(2, device="cuda", limit=LIMIT)
    try:
        for name in LAYERS:
            pool.run(check, name)
            print(name, flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    # Workers look `check` up in its module, which is not theirs where it is called __main__.
    from tests.dist_gpu import sanitized

    sanitized.main()
