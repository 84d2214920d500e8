"""Data with the same order and random numbers after a restart. This package imports torch."""

from __future__ import annotations

from holdfast.data.gang_sampler import GangSampler
from holdfast.data.keyed import Indexed, indexed, keyed

__all__ = ["GangSampler", "Indexed", "indexed", "keyed"]
