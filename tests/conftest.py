"""For all tests: no property test is judged by the clock of a busy machine.

Under CI the examples are the same in each run, so that a red run is about the change; on a desk they
are new each time, so that somebody finds the next bug.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("holdfast")
