"""Settings of all tests.

No property test has a deadline, because a busy machine would break it. Under CI the examples are the
same in each run, so that a red run is about the change; elsewhere they are new each time.

Processes that a test starts find `tests.support` as the test does, from whatever directory they run in.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("holdfast")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")))
)
