"""How experts are split over the ranks of a group.

One rule, used by argument checks, the exchange, the module and the checkpoint converters.
"""

from __future__ import annotations


def expert_range(num_experts: int, rank: int, ranks: int) -> range:
    """The experts that `rank` of `ranks` holds: a contiguous split, earlier ranks one more.

    6 experts on 4 ranks are 2, 2, 1, 1; with fewer experts than ranks the last ranks hold none.

    Raises:
        ValueError: num_experts < 1, ranks < 1 or rank outside [0, ranks).
    """
    if num_experts < 1:
        raise ValueError(f"expert_range: num_experts: expected at least 1, got {num_experts}")
    if ranks < 1:
        raise ValueError(f"expert_range: ranks: expected at least 1, got {ranks}")
    if not 0 <= rank < ranks:
        raise ValueError(f"expert_range: rank: expected 0 <= rank < {ranks}, got {rank}")
    share, extra = divmod(num_experts, ranks)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))
