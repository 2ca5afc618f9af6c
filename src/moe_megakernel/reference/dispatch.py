"""dispatch: brings each route's row to the rank and the place of its expert.

With one rank this is a gather. Several ranks use `distributed.exchange` around the same gather. In backward the same
stage carries dy (and x once more), and its mirror is the combine.
"""

from __future__ import annotations

from torch import Tensor


def gather_rows(tokens: Tensor, routes: Tensor, top_k: int) -> Tensor:
    """Rows of x or dy in the order of `routes`.

    Args:
        tokens: [T, H], any strides.
        routes: int32 [n], route ids t * K + k.
        top_k: K.

    Returns:
        [n, H], contiguous.
    """
    return tokens.index_select(0, routes // top_k)


def gather_weights(topk_weights: Tensor, routes: Tensor) -> Tensor:
    """Routing weights in the order of `routes`: [T, K] -> [n]."""
    return topk_weights.reshape(-1).index_select(0, routes)
