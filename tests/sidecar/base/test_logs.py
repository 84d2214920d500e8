"""The log stays short, whatever callers send."""

from __future__ import annotations

import logging

import pytest
from tests.support.clock import ManualClock

from holdfast_sidecar.base import logs


def test_what_others_cause_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limited = logs.RateLimited(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            limited.warning("room", "no room")
        clock.advance(61)
        limited.warning("room", "no room")
    assert [r.fields["occurred"] for r in caplog.records] == [1, 1000]  # type: ignore[attr-defined]


def test_libraries_log_a_few_lines_of_each_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.configure(ManualClock(), job="j")  # each minute may log five lines
        for number in range(1000):
            logging.getLogger("aiohttp.server").error("Error handling request from %s", number)
            logs.info(f"own line {number}")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert sum("Error handling" in line for line in lines) == 5
    assert sum("own line" in line for line in lines) == 1000
