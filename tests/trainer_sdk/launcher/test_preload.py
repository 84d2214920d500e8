"""The fork server imports modules without the garbage collector, which the ranks have again."""

from __future__ import annotations

import os
import subprocess
import sys

from holdfast.base.settings import single_thread_defaults

PROGRAM = """
import gc
from holdfast.launcher import forkserver
runs_before = sum(generation["collections"] for generation in gc.get_stats())
forkserver.preload(["json"])
print(sum(generation["collections"] for generation in gc.get_stats()) - runs_before)
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_imports_are_not_collected_and_ranks_collect_only_what_they_make_themselves() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **single_thread_defaults(os.environ)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["0", "True True"], done.stderr
