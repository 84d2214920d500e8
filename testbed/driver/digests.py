"""Final digests of the example trainer, which prints one JSON line for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterable

MARK = '{"finalDigest"'


def find_digests(logs: Iterable[str]) -> dict[int, str]:
    """Return the SHA-256 of model, optimizer, RNG and data position of each rank."""
    digests: dict[int, str] = {}
    for text in logs:
        for line in text.splitlines():
            start = line.find(MARK)
            if start >= 0:
                entry = json.loads(line[start:])
                digests[int(entry["rank"])] = str(entry["finalDigest"])
    return digests
