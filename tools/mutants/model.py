"""One mutant, and its text. Pure, except for the reading of the file."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath


class Kind(StrEnum):
    """The kind of mistake."""

    COMPARISON = "comparison"
    OFF_BY_ONE = "off by one"
    DROPPED_FSYNC = "dropped fsync"
    DROPPED_LOCK = "dropped lock"
    SWAPPED_WRITES = "swapped writes"
    IGNORED_EXCEPTION = "ignored exception"
    MISSING_DIGEST = "missing digest"
    MISSING_CHECK = "missing check"
    CHANGED_CONSTANT = "changed constant"


class StaleMutantError(Exception):
    """Error: the mutant does not fit the code any more, so that its change must be written again."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake that the tests must find."""

    name: str
    """Place and mistake, such as `node/manifest-without-fsync`."""
    kind: Kind
    file: str
    """Path of the file below the root of the repository."""
    original: str
    """Text of the file that occurs exactly once."""
    replacement: str
    loses: str
    """What a user would lose, in one sentence."""
    tests: tuple[str, ...]
    """Files or node ids of tests. At least one of them must fail."""

    @property
    def source(self) -> str:
        """Folder that is on `sys.path`, such as `core/src`."""
        parts = PurePosixPath(self.file).parts
        return str(PurePosixPath(*parts[: parts.index("src") + 1]))

    @property
    def module(self) -> str:
        """Dotted name of the file."""
        relative = PurePosixPath(self.file).relative_to(self.source)
        return ".".join(relative.with_suffix("").parts)

    def mutated(self, root: Path) -> str:
        """Return the text of the file with the mistake. Raises StaleMutantError."""
        text = (root / self.file).read_text() if (root / self.file).is_file() else ""
        count = text.count(self.original)
        if count != 1:
            raise StaleMutantError(
                f"mutant {self.name}: its original text occurs {count} times in {self.file}, expected once. "
                f"The code has changed: write the mutant again, so that it makes the same mistake in the new "
                f"code. The text is:\n{self.original}"
            )
        return text.replace(self.original, self.replacement)

    def diff(self, root: Path) -> str:
        before = (root / self.file).read_text().splitlines(keepends=True)
        after = self.mutated(root).splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.file, self.file, n=2))


def chosen(mutants: tuple[Mutant, ...], pattern: str) -> tuple[Mutant, ...]:
    """Return the mutants that a pattern names: a name with `*`, or a part of a name."""
    wanted = pattern if "*" in pattern else f"*{pattern}*"
    return tuple(m for m in mutants if fnmatchcase(m.name, wanted))
