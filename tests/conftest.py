"""Settings of all tests.

No property test has a deadline, because a busy machine would break it. Under CI the examples are the
same in each run, so that a red run is about the change; elsewhere they are new each time.

Processes that a test starts find `tests.support` as the test does, from whatever directory they run in.
A shell that starts the tests in the background makes them ignore SIGINT, and the processes that they
start inherit that: Ctrl-C would do nothing in the tests that send it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("holdfast")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")))
)
