"""The journal of the benchmark: one line for each repetition, appended as soon as it is measured.

An interrupted benchmark continues with the repetitions that are missing. Entries of other images or of
another size of the state do not count, because their times do not compare.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One repetition of one case."""

    case: str
    repetition: int
    seconds: float | None
    """From the fault to the next training step. None: the case measures no time."""
    load: float
    """Load average of the machine, over one minute, after the repetition."""
    details: dict[str, Any] = field(default_factory=dict)


class Journal:
    def __init__(self, path: Path, setting: str) -> None:
        """Open the journal. `setting` names what entries must have in common to be compared."""
        self._path = path
        self._setting = setting

    def entries(self) -> list[Entry]:
        """Return the entries of this setting. A line that was cut off by a kill is left out."""
        found = []
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row.pop("setting", None) == self._setting:
                found.append(Entry(**row))
        return found

    def missing(self, case: str, repetitions: int) -> list[int]:
        """Return the repetitions of a case, out of `repetitions`, that are not measured yet."""
        done = {e.repetition for e in self.entries() if e.case == case}
        return [n for n in range(repetitions) if n not in done]

    def append(self, entry: Entry) -> None:
        """Add an entry durably. It begins on a new line also after one that was cut off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        row = json.dumps({"setting": self._setting, **asdict(entry)})
        with self._path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                row = row if file.read(1) == b"\n" else "\n" + row
            file.write(row.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
