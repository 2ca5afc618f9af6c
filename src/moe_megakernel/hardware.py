"""What GPUs can do, as plain numbers with their origin: the one table that the simulator and benchmark reports read.

Every figure is of one of three kinds, named in the comment beside it: *datasheet* (the vendor's, dense, without
sparsity), *measured* (on one H200, 2026-12-01, or published by somebody who measured), or *assumed* (carried over from
another generation, with the reason).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One GPU and its NVLink domain. Rates in operations or bytes a second, times in seconds."""

    slug: str
    name: str
    sms: int
    bf16_flops: float  # dense, datasheet
    fp8_flops: float  # dense, datasheet
    bf16_achievable: float  # share of bf16_flops that a long GEMM main loop keeps up
    fp8_achievable: float
    hbm_bandwidth: float  # datasheet
    hbm_achievable: float  # share of it that copies reach
    combine_achievable: float  # share of it that the gather and sum of the combine reaches
    l2_bytes: float
    link_bandwidth: float  # of one GPU, in one direction, datasheet
    pull_achievable: float  # payload share of it when rows are read from peers
    push_achievable: float  # the same when rows are stored to peers
    domain: int  # GPUs that reach each other's memory
    flag_latency: float  # a release of one SM seen by another of the same GPU
    link_latency: float  # the same across NVLink; a pull's first byte takes one round trip, twice this
    tile_fill: float  # start of a tile until the first product: waits, first loads
    tile_drain: float  # last product until the tile's rows are stored and released
    drain_overlaps: bool  # the next tile's products run during the drain
    pull_rate_per_warp: float  # bytes a second of one spare pulling warp of a block
    copy_rate_per_sm: float  # bytes a second of an SM that does nothing but copy

    def flops(self, dtype: str) -> float:
        """Rate of a long main loop on all SMs, in operations a second."""
        return self.bf16_flops * self.bf16_achievable if dtype == "bf16" else self.fp8_flops * self.fp8_achievable


H200 = Hardware(
    slug="h200",
    name="H200 SXM",
    sms=132,  # datasheet
    bf16_flops=989e12,  # datasheet: 1979 with sparsity
    fp8_flops=1979e12,  # datasheet: 3958 with sparsity
    bf16_achievable=0.77,  # measured: cuBLAS 8192^3 722-808 TFLOP/s cold, middle 765 (605 when hot)
    fp8_achievable=0.685,  # measured: cuBLAS 8192^3 1355 TFLOP/s
    hbm_bandwidth=4.8e12,  # datasheet
    hbm_achievable=0.875,  # measured: device copy 4.2 TB/s
    combine_achievable=0.71,  # measured: prototype's combine 3.4 TB/s
    l2_bytes=50e6,  # vendor's H100 white paper; the same die
    link_bandwidth=450e9,  # datasheet: 900 GB/s, both directions
    pull_achievable=0.76,  # published, see GB300; on H200 not measured across GPUs yet
    push_achievable=0.82,  # published, see GB300
    domain=8,  # HGX H200
    flag_latency=1.0e-6,  # assumed: a release, polling and an acquire through L2, 0.2 us each way plus fences
    link_latency=1.5e-6,  # public microbenchmarks of NVLink loads: 1-2 us
    tile_fill=1.0e-6,  # assumed: a wait met, and the first loads from DRAM
    tile_drain=1.5e-6,  # measured: gate_up 717-739, down 631-715 against 765 TFLOP/s leave 1.5-2 us a task
    drain_overlaps=False,  # WGMMA accumulators are registers: one tile at a time
    pull_rate_per_warp=10e9,  # measured: 1.25-1.44 TB/s over 132 warps
    copy_rate_per_sm=30e9,  # assumed: 15 SMs fill NVLink, as published for B200
)

GB300 = Hardware(
    slug="gb300",
    name="GB300 NVL72",
    sms=152,  # of one GPU as the driver shows it
    bf16_flops=2.5e15,  # datasheet: 360 PFLOP/s with sparsity over 72 GPUs
    fp8_flops=5.0e15,  # datasheet: 720 PFLOP/s with sparsity over 72 GPUs
    bf16_achievable=0.70,  # assumed: power holds it to the H200's hot-to-cold range (0.61-0.82), middle
    fp8_achievable=0.65,  # assumed, as above
    hbm_bandwidth=8.0e12,  # datasheet: 576 TB/s over 72 GPUs
    hbm_achievable=0.875,  # assumed: as H200
    combine_achievable=0.71,  # assumed: as H200
    l2_bytes=126e6,  # vendor's Blackwell tuning guide, B200
    link_bandwidth=900e9,  # datasheet: 1.8 TB/s, both directions
    pull_achievable=0.76,  # published by Mixture-of-Kittens: a 131 KB tile takes 172 KB on the wire
    push_achievable=0.82,  # the same source: 160 KB
    domain=72,
    flag_latency=1.0e-6,  # assumed: as H200
    link_latency=1.5e-6,  # assumed: as H200
    tile_fill=1.0e-6,  # assumed: as H200
    tile_drain=3.0e-6,  # assumed: twice the H200's, since one warpgroup stores a tile instead of two
    drain_overlaps=True,  # accumulators in tensor memory, two at a time
    pull_rate_per_warp=10e9,  # assumed: as H200
    copy_rate_per_sm=60e9,  # published (ThunderKittens): about 15 of B200's 148 SMs fill NVLink
)

GB200 = Hardware(
    slug="gb200",
    name="GB200 NVL72",
    sms=152,  # of one GPU as the driver shows it
    bf16_flops=2.5e15,  # datasheet: 5 PFLOP/s with sparsity
    fp8_flops=5.0e15,  # datasheet: 10 PFLOP/s with sparsity
    bf16_achievable=0.65,  # assumed: GB300's, less by the lower power limit (1.2 against 1.4 kW)
    fp8_achievable=0.60,  # assumed, as above
    hbm_bandwidth=8.0e12,  # datasheet
    hbm_achievable=0.875,
    combine_achievable=0.71,
    l2_bytes=126e6,
    link_bandwidth=900e9,  # datasheet: 1.8 TB/s, both directions
    pull_achievable=0.76,
    push_achievable=0.82,
    domain=72,
    flag_latency=1.0e-6,
    link_latency=1.5e-6,
    tile_fill=1.0e-6,
    tile_drain=3.0e-6,
    drain_overlaps=True,
    pull_rate_per_warp=10e9,
    copy_rate_per_sm=60e9,
)

HARDWARE: dict[str, Hardware] = {gpu.slug: gpu for gpu in (H200, GB200, GB300)}


def find_hardware(slug: str, op: str = "find_hardware") -> Hardware:
    """The hardware of that name, in any case.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    found = HARDWARE.get(slug.lower())
    if found is None:
        raise ValueError(f"{op}: hardware: expected one of {', '.join(HARDWARE)}, got {slug!r}")
    return found
