"""The digest by which the tests compare two trainings bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def digest_of(values: Iterable[object]) -> str:
    """Return a hexadecimal SHA-256 over the bytes of the tensors in `values`, in their order.

    A state_dict may have other values: Megatron's and TransformerEngine's extra states can be None.
    """
    sum_ = hashlib.sha256()
    for tensor in values:
        if isinstance(tensor, torch.Tensor):
            sum_.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()
