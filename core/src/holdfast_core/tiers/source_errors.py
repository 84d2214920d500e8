"""Record of the places that were asked for a shard or a document, and of the error of each."""

from __future__ import annotations

from holdfast_core.errors import FormatError, NotFoundError, UnreadableError


class SourceErrors:
    """Errors of one attempt. `str()` joins them into one message, which begins with the last one.

    The object store is asked last and has the last word. The operator shows the first error in Events, and
    leaves the others to the log.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self.retryable = False
        """Whether a retry may succeed, because a place was unreachable or busy and may have the data."""

    def failed(self, what: str, error: BaseException) -> None:
        """Add the error of a place. It sets `retryable` unless the place has no good copy for sure."""
        self.add(f"{what}: {error}")
        if isinstance(error, UnreadableError):
            self.retryable = self.retryable or error.may_pass
        else:
            self.retryable = self.retryable or not isinstance(error, NotFoundError | FormatError)

    def add(self, text: str) -> None:
        """Add a message about a place that does not have the data."""
        self._text.append(text)

    def __str__(self) -> str:
        return "; ".join(reversed(self._text))
