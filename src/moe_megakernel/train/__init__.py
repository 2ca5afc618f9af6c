"""The demo trainer behind `moe-megakernel train`: a small byte-level MoE transformer on real text.

A user of the library like any other: it reaches the layer only through `moe_megakernel.MoE` and `reserve`. Start
reading at `launch.py` (the parent process), then `loop.py` (what every rank runs).
"""
