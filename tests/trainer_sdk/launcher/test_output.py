"""The output of a rank reaches the console, and the launcher goes on where the console takes nothing."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.support.hang import HANG_SECONDS

from holdfast.launcher.output import OutputPump


async def pumped(target: BinaryIO, *written: bytes) -> OutputPump:
    """Write to a pump, one write after the other, and close the pipe. Return it when it has ended."""
    read, write = os.pipe()
    pump = OutputPump(read, "[rank 0] ", target, None)
    pump.start()
    for data in written:
        os.write(write, data)
        await asyncio.sleep(0)
    os.close(write)
    async with asyncio.timeout(HANG_SECONDS):
        await pump.drained.wait()
    return pump


def test_each_line_begins_with_the_rank(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb", buffering=0) as log:
        asyncio.run(pumped(log, b"step 1\nst", b"ep 2\n", b"no end"))
    assert (tmp_path / "log").read_text() == "[rank 0] step 1\n[rank 0] step 2\n[rank 0] no end\n"


class Log(io.BytesIO):
    """A console that shows when it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, data: Any) -> int:
        self.written.set()
        return super().write(data)


@pytest.mark.parametrize("version", ["\r{}", "{}\r"])
def test_a_progress_bar_is_shown_before_its_line_ends(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.launcher.output._BAR_SECONDS", HANG_SECONDS)

    async def shown() -> list[str]:
        log = Log()
        read, write = os.pipe()
        pump = OutputPump(read, "[rank 0] ", log, None)
        pump.start()
        os.write(write, version.format("0%").encode() + version.format("20%").encode())
        async with asyncio.timeout(HANG_SECONDS):
            await log.written.wait()
        before = log.getvalue().decode()
        for text in ("99%", "100%"):
            os.write(write, version.format(text).encode())
            await asyncio.sleep(0)
        os.write(write, b"\nend\r\n")
        os.close(write)
        async with asyncio.timeout(HANG_SECONDS):
            await pump.drained.wait()
        return [before, log.getvalue().decode()]

    bar = "[rank 0] 20%\n"
    assert asyncio.run(shown()) == [bar, f"{bar}[rank 0] 100%\n[rank 0] end\n"]


@pytest.mark.fault("The disk is full to which the output of `holdfast run` goes, when a rank ends")
@pytest.mark.parametrize("text", [b"line\n", b"no end of a line", b"line\nno end of a line"])
def test_a_console_that_takes_nothing_keeps_no_rank_from_ending(text: bytes) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        asyncio.run(pumped(full, text))


@pytest.mark.fault("The terminal of `holdfast run` is closed, and the launcher lives on")
def test_a_terminal_that_was_closed_keeps_no_rank_from_ending() -> None:
    ours, theirs = os.openpty()
    os.close(ours)
    with open(theirs, "wb", buffering=0) as terminal:
        asyncio.run(pumped(terminal, b"no end of a line"))
