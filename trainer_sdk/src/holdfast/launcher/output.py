"""Copies the ranks' output, prefixed by rank, to the launcher's stdout and stderr, and to files.

Memory is bounded: a line above 64 KiB is split, and a tail keeps the last 2 KiB.

The files of a rank are DIR/<run id>/attempt_<round>/<rank>/stdout.log and stderr.log. A run that is started
again under the same run id appends to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.launcher.options import LogOptions, Streams
from holdfast_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StreamFile:
    """A file that holds a stream of a rank, and whether the console shows the stream, too."""

    file: BinaryIO
    on_console: bool


class LogFiles:
    """Opens the files of ranks.

    Args:
        options: What the command line says.
        run_id: Identity of the run.
    """

    def __init__(self, options: LogOptions, run_id: str) -> None:
        self._options = options
        self._run_id = re.sub(r"[^A-Za-z0-9._-]", "_", run_id) or "run"
        self._root: Path | None = None

    def prepare(self) -> Path | None:
        """Create the directory and return it, or None if no stream goes to a file.

        Raises ConfigError where the directory cannot be created.
        """
        options = self._options
        if not options.redirects and not options.tee:
            return None
        try:
            base = Path(options.directory or tempfile.mkdtemp(prefix="holdfast-logs-"))
            self._root = base / self._run_id
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"holdfast run: --log-dir {options.directory}: {error}") from error
        return self._root

    def open(self, local_rank: int, rank: int, attempt: int) -> dict[Streams, StreamFile]:
        """Open the files of a rank. The caller closes them. Raises OSError."""
        if self._root is None:
            return {}
        redirected, teed = (c.of(local_rank) for c in (self._options.redirects, self._options.tee))
        files = {}
        for stream, name in ((Streams.STDOUT, "stdout.log"), (Streams.STDERR, "stderr.log")):
            if stream & (redirected | teed):
                path = self._root / f"attempt_{attempt}" / str(rank) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                files[stream] = StreamFile(path.open("ab"), on_console=bool(stream & teed))
        return files


logger = logging.getLogger(__name__)

TAIL_BYTES = 2048
_MAX_LINE_BYTES = 64 * 1024
_BAR_SECONDS = 1.0
"""Shortest time between two versions of a progress bar, each of which is a line of the log."""


class Tail:
    """The last TAIL_BYTES of a stream, as text."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        self._data = (self._data + data)[-TAIL_BYTES:]

    def text(self) -> str:
        return self._data.decode(errors="replace").strip()


class OutputPump:
    """Reads one pipe until its end and writes complete lines, each with `prefix` in front.

    Of a line that a progress bar writes over, the newest version is written from time to time.

    Call `start` in a running event loop. `drained` is set at the end of the pipe.

    Args:
        descriptor: The pipe.
        prefix: What each line begins with.
        target: Receives the lines. What it does not take is lost.
        tail: Keeps the last bytes, or None.
        copy: File that receives the same bytes without the prefix, or None. It is closed at the end.
    """

    def __init__(
        self,
        descriptor: int,
        prefix: str,
        target: BinaryIO,
        tail: Tail | None,
        copy: BinaryIO | None = None,
    ) -> None:
        self._copy = copy
        self._descriptor = descriptor
        self._prefix = prefix.encode()
        self._target = target
        self._tail = tail
        self._partial = b""
        self._bar: asyncio.TimerHandle | None = None
        """When the next version of a progress bar may be written. None: at once."""
        self._shown = b""
        """The newest version that was written."""
        self.drained = asyncio.Event()

    def start(self) -> None:
        os.set_blocking(self._descriptor, False)
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_readable)

    def close(self) -> None:
        """Write an incomplete last line and close the pipe, even if a grandchild holds its other end."""
        if not self.drained.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            if self._bar is not None:
                self._bar.cancel()
            if self._partial:
                self._emit([self._partial])
                self._partial = b""
            os.close(self._descriptor)
            if self._copy is not None:
                with contextlib.suppress(OSError):  # a full disk, which was reported before
                    self._copy.close()
            self.drained.set()

    def _on_readable(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        if self._tail is not None:
            self._tail.add(data)
        if self._copy is not None:
            self._append(self._copy, data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if b"\r" in self._partial:
            newest, ends = _newest_version(self._partial), self._partial.endswith(b"\r")
            self._partial = newest + b"\r" if ends else b"\r" + newest
        if len(self._partial) > _MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self._emit(lines)
        if self._bar is None:
            self._show_bar()

    def _show_bar(self) -> None:
        """Write the newest version of a progress bar, and the next one after some time."""
        self._bar = None
        is_new = b"\r" in self._partial and self._partial != self._shown
        if is_new and self._partial.strip():
            self._shown = self._partial
            self._emit([self._partial])
            self._bar = asyncio.get_running_loop().call_later(_BAR_SECONDS, self._show_bar)

    def _append(self, file: BinaryIO, data: bytes) -> None:
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            # Training must continue, and the console still shows the lines.
            logger.error("%s: %s: this file receives no more output", file.name, error)
            self._copy = None

    def _emit(self, lines: Iterable[bytes]) -> None:
        data = b"".join(self._prefix + _newest_version(line) + b"\n" for line in lines)
        # The reader of the log may have ended (`holdfast run | head`), the terminal be closed, or the disk
        # be full. Training must continue, and later lines may find room.
        with contextlib.suppress(OSError, ValueError):  # the latter if the file object is closed
            self._target.write(data)
            self._target.flush()


def _newest_version(line: bytes) -> bytes:
    """Return what a terminal shows of a line, whose versions each begin or end with a carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def open_streams(
    prefix: str, files: Mapping[Streams, StreamFile], tail: Tail
) -> tuple[list[int], list[OutputPump]]:
    """Return the descriptors for a rank's stdout and stderr, and the pumps that read the other ends.

    A stream that is redirected to a file needs no pump: the rank itself writes to the file.

    Args:
        prefix: What each line begins with on the console.
        files: The files of streams that go to one.
        tail: Keeps the last bytes of stderr.
    """
    descriptors, pumps = [], []
    for stream, console, kept in (
        (Streams.STDOUT, sys.stdout.buffer, None),
        (Streams.STDERR, sys.stderr.buffer, tail),
    ):
        to = files.get(stream)
        if to is not None and not to.on_console:
            with to.file as file:
                descriptors.append(os.dup(file.fileno()))
            continue
        read, write = os.pipe2(os.O_CLOEXEC)
        descriptors.append(write)
        pumps.append(OutputPump(read, prefix, console, kept, None if to is None else to.file))
    return descriptors, pumps
