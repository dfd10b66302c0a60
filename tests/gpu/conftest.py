"""What several GPU tests get."""

from __future__ import annotations

import pytest

from trainfuse.runtime.cache import KernelCache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> KernelCache:
    """A module's own kernels: nothing compiled elsewhere is found."""
    folder = tmp_path_factory.mktemp("kernels")
    folder.chmod(0o700)
    return KernelCache(folder)
