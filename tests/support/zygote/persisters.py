"""Persisters that tests fork from the zygote, where the SDK executes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.zygote.popen import Popen, subprocess_with

from holdfast.places import folder


@contextmanager
def forked_persisters() -> Iterator[None]:
    """Let Checkpointers of this process fork their persisters from the zygote within the `with` block.

    A persister needs 0.2 CPU seconds for its imports, and tests of the SDK start about a thousand.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "subprocess", subprocess_with(Popen))
        yield
