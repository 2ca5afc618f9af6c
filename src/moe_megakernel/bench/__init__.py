"""The layer timed beside what its users would take instead, in one process: see docs/benchmarks.md."""
