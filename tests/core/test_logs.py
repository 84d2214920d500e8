"""The log stays short, whatever callers send."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.clock import ManualClock

from holdfast_core import logs


@pytest.mark.fault("A caller causes log lines without end")
def test_what_others_cause_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    limited = logs.RateLimited(clock)
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            limited.warning("room", "no room")
        clock.advance(61)
        limited.warning("room", "no room")
    said = [r.fields["occurred"] for r in caplog.records if r.getMessage() == "no room"]  # type: ignore[attr-defined]
    assert said == [1, 1000]


@contextmanager
def configured() -> Iterator[ManualClock]:
    """Configure the logs of a sidecar whose minute ends when the test advances this clock."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    clock = ManualClock()
    try:
        logs.configure("INFO", clock, own_warnings=20, job="j")
        yield clock
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_libraries_log_a_few_lines_of_each_message(capsys: pytest.CaptureFixture[str]) -> None:
    with configured():
        for number in range(1000):
            logging.getLogger("aiohttp.server").error("Error handling request from %s", number)
            logs.info(f"own line {number}")
    found = [line["message"] for line in lines(capsys)]
    assert sum("Error handling" in text for text in found) == 5
    assert sum("own line" in text for text in found) == 1000


def test_a_failure_that_repeats_is_logged_a_few_times_a_minute_with_one_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with configured() as clock:
        for number in range(1000):
            logs.failure("Stage failed", KeyError(number))
            logs.warning("a slot cannot be used", slot=number)
        logs.info("committed locally", step=7)
        found = lines(capsys)
        failures = [line for line in found if line["message"] == "Stage failed"]
        assert 2 <= len(failures) <= 100
        assert [line["error"] for line in failures[:2]] == ["KeyError: 0", "KeyError: 1"]
        assert ["exception" in line for line in failures[:2]] == [True, False]
        assert 2 <= sum(line["message"] == "a slot cannot be used" for line in found) <= 100
        assert sum(line.get("left_out", 0) for line in found) + len(found) == 2001

        clock.advance(60)
        logs.failure("Stage failed", KeyError(7))
        (again,) = lines(capsys)
        assert "exception" in again
