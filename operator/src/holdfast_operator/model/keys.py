"""Keys of the work queue. A key identifies one object and holds none of its content."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from holdfast_core.api import CheckpointAdoption, Gang
from holdfast_operator.model.job import Unreadable


class KeyKind(StrEnum):
    JOB = "job"
    ADOPTION = "adoption"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class Key:
    kind: KeyKind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def job_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.JOB, namespace, name)


def adoption_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.ADOPTION, namespace, name)


def gang_key(gang: Gang | Unreadable) -> Key:
    """Return the key of a TrainingJob or a CheckpointAdoption."""
    kind = KeyKind.ADOPTION if gang.kind == CheckpointAdoption.KIND else KeyKind.JOB
    return Key(kind, gang.namespace, gang.name)


def store_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.STORE, namespace, name)
