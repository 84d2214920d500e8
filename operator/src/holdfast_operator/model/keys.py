"""Keys of the work queue. A key identifies one object and holds none of its content."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KeyKind(StrEnum):
    JOB = "job"
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


def store_key(namespace: str, name: str) -> Key:
    return Key(KeyKind.STORE, namespace, name)
