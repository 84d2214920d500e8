"""The digest by which the tests compare two trainings bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hexadecimal SHA-256 over the bytes of `tensors`, in their order."""
    sum_ = hashlib.sha256()
    for tensor in tensors:
        sum_.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()
