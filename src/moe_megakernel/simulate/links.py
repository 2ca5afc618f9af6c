"""Shares of NVLink among concurrent transfers. Called once a time step by `engine`; knows nothing of tiles or tasks.

A stream is what one rank pulls (or pushes) at a time: its bytes spread over peers in fixed shares, because rows of a
tile come interleaved from all of them. A resource is one direction of one rank's link, or a rank's copying engine. All
streams grow at the same rate until one of their resources is full or their demand is met (max-min fairness).
"""

from __future__ import annotations

import numpy as np

_NEAR = 1e-9  # relative; below it a resource counts as full and a demand as met


def fair_rates(usage: np.ndarray, capacity: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """Max-min fair rates of streams that each load several resources.

    Args:
        usage: [resources, streams] load on a resource for a rate of 1.
        capacity: [resources], may be infinite.
        demand: [streams] the most a stream can use, finite.

    Returns:
        [streams] rates with `usage @ rates <= capacity` and `rates <= demand`.
    """
    rates = np.zeros_like(demand)
    left = capacity.astype(float)
    growing = demand > 0
    while growing.any():
        load = usage @ growing
        loaded = load > 0
        room = (left[loaded] / load[loaded]).min() if loaded.any() else np.inf
        step = min(room, float((demand - rates)[growing].min()))
        rates[growing] += step
        left[loaded] -= load[loaded] * step
        full = loaded & (left <= _NEAR * capacity) & np.isfinite(capacity)
        growing = growing & (demand - rates > _NEAR * demand)
        if full.any():
            growing &= ~(usage[full] > 0).any(axis=0)
    return rates


def stream_usage(shares: np.ndarray, wire: float, reading: bool) -> np.ndarray:
    """Loads of W streams on [W egress, W ingress, W engines], one stream for each rank that copies.

    Args:
        shares: [W, W] for every copying rank (row) the share of its bytes that each peer holds or gets; rows sum to 1
            or are 0. The diagonal is local and loads no link.
        wire: bytes on the wire for a byte of payload.
        reading: the copying rank reads from its peers; else it stores to them.
    """
    ranks = len(shares)
    remote = shares * wire
    np.fill_diagonal(remote, 0.0)
    peers = remote.T  # [peer, copying rank]
    own = np.diag(remote.sum(axis=1))
    engine = np.eye(ranks)
    return np.concatenate([peers, own, engine] if reading else [own, peers, engine])
