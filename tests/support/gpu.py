"""Marks of tests that need a GPU, and of tests that run once on each kind of device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="there is no GPU (torch.cuda.is_available() is false)",
    ),
)

DEVICES = (pytest.param("cpu"), pytest.param("cuda", marks=_MARKS))
"""Values of a parameter `device`."""


def needs_gpu(test: Any) -> Any:
    """Mark a test for `make test-gpu`, and skip it where there is no GPU."""
    for mark in _MARKS:
        test = mark(test)
    return test
