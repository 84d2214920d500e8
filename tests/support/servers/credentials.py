"""Credentials of a store that a test gives directly."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.store.s3.credentials import Keys


@dataclass(frozen=True, slots=True)
class StaticCredentials:
    """Keys that never change."""

    keys: Keys

    def retrieve(self) -> Keys:
        return self.keys

    def refresh(self) -> Keys:
        return self.keys
