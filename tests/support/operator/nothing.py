"""What a pass reads outside of the cache: nothing."""

from __future__ import annotations

from collections.abc import Callable


class Nothing:
    """Every call returns None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
