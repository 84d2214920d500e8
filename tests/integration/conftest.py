from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.trainer import local_pods


@pytest.fixture
def forked_pods() -> Iterator[None]:
    """Let the pods of `demo.local` in this test fork their containers instead of executing them."""
    with local_pods.forked_pods():
        yield
