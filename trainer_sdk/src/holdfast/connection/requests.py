"""Requests to save or to stop, which arrive as messages, as a signal or as Ctrl-C."""

from __future__ import annotations

import threading


class Requests:
    """The requests that a rank has not fulfilled yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: set[str] = set()
        self._save = False
        self._stop = False
        self._is_interrupted = False

    @property
    def stop(self) -> bool:
        """Whether the training is to stop."""
        return self._stop or self._is_interrupted

    def note(self, token: str, *, stop: bool) -> None:
        """Record a request to stop, or else to save. A token that was seen before is ignored."""
        with self._lock:
            if token in self._tokens:
                return
            self._tokens.add(token)
            if stop:
                self._stop = True
            else:
                self._save = True

    def take_save(self) -> bool:
        """Return whether a save was requested, and clear the request."""
        with self._lock:
            requested, self._save = self._save, False
            return requested

    def request_stop(self) -> None:
        """Record a request to stop. A signal handler calls this, so it must not acquire a lock."""
        self._stop = True

    def interrupt(self) -> None:
        """Record a request to stop by Ctrl-C, which lasts until `forget_interrupt`."""
        self._is_interrupted = True

    def forget_interrupt(self) -> bool:
        """Clear the request of `interrupt`. Return False if another request to stop remains."""
        self._is_interrupted = False
        return not self._stop
