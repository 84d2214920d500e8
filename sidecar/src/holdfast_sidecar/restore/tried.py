"""The places that were asked for something, and what each of them said."""

from __future__ import annotations

from holdfast_core.errors import FormatError, NotFoundError


class Tried:
    def __init__(self) -> None:
        self._words: list[str] = []
        self.may_come = False
        """Some place was silent or busy and may yet have it: asking again is not in vain."""

    def failed(self, what: str, error: BaseException) -> None:
        self.add(f"{what}: {error}")
        self.may_come = self.may_come or not isinstance(error, NotFoundError | FormatError)

    def add(self, words: str) -> None:
        """A place that has not got it."""
        self._words.append(words)

    def __str__(self) -> str:
        return "; ".join(self._words)
