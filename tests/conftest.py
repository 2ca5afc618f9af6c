"""Settings of every test session: one thread, a fixed seed per test, and a compile cache that starts empty.

Compile caches do not know of effects or of changes in the ops' Python code, so a session never reads an older one's.
"""

from __future__ import annotations

import os
import tempfile

# Before torch is imported: it reads the folder when it compiles for the first time. Child processes inherit it.
_cache = tempfile.TemporaryDirectory(prefix="moe-test-inductor-", ignore_cleanup_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name

import pytest  # noqa: E402
import torch  # noqa: E402


def pytest_configure() -> None:
    # The bits of matrix products on CPU depend on the number of threads; the machine must not choose it.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
