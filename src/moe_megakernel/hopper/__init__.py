"""The backends `mega` and `staged` on Hopper: what stands between the op's arguments and the CUDA kernels.

`support` says what they can run, `layout` makes tensors fit, `workspaces` and `device_status` own the memory that
outlives a call, `ops` holds the schemas, `launch` what both directions share, and `forward` and `backward` put them
together. With several ranks `rows` runs each rank's experts between collectives, or `peer` the whole layer in memory
that the ranks share (`peer_memory`), with errors that name ranks (`peer_status`).
"""
