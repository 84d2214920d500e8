"""Notices whether batches draw from the global random number generators while they are fetched.

Such batches differ after a restart: a loader fetches ahead, so that the saved generators have already drawn
for batches that were not trained yet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class DrawWatch:
    """Compares the generators before and after a fetch, until the first save.

    The first fetch of a pass is left out, because samplers may draw the order of the pass in it. Draws in
    the workers of a loader are not seen.
    """

    def __init__(self) -> None:
        self.has_drawn = False
        self._is_first = True
        self._has_ended = False

    def pass_begins(self) -> None:
        """Leave out the next fetch."""
        self._is_first = True

    def end(self) -> None:
        """Stop comparing."""
        self._has_ended = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the generators before and after this block, which fetches batches."""
        if self._is_first or self._has_ended:
            self._is_first = False
            yield
            return
        before = _generators()
        yield
        self.has_drawn = self.has_drawn or _generators() != before


def _generators() -> tuple[object, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()
