"""The log of the operator leaves out a warning of kopf that would mislead, and no other."""

from __future__ import annotations

import inspect
import logging

import pytest
from kopf._core.reactor import running
from tests.support.clock import ManualClock

from holdfast_operator.base import logs

IGNORED = "OS signals are ignored: running not in the main thread."


def test_the_warning_of_kopf_that_its_thread_handles_no_signals_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert IGNORED in inspect.getsource(running)
    root = logging.getLogger()
    own = logging.getLogger("holdfast_operator")
    before = root.handlers[:], root.level, own.level
    try:
        logs.configure("INFO", ManualClock())
        running.logger.warning(IGNORED)
        running.logger.warning("another warning")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])
    log = capsys.readouterr().err
    assert "another warning" in log
    assert "signals are ignored" not in log
