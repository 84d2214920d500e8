"""For all tests: no property test is judged by the clock of a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("holdfast", deadline=None)
settings.load_profile("holdfast")
