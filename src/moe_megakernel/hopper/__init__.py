"""The backends `mega` and `staged` on Hopper: what stands between the op's arguments and the CUDA kernels.

`support` says what they can run, `layout` makes tensors fit, `workspaces` and `device_status` own the memory that
outlives a call, `ops` holds the schemas, and `forward` puts them together.
"""
