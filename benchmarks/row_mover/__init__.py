"""The row mover alone, pull against push, between ranks that share memory: `python -m benchmarks.row_mover`."""
