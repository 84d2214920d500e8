"""Imported by each Python process that finds this folder in PYTHONPATH: it records functions while it runs.

HOLDFAST_TRACE names a folder. Its file `recording` has one byte, which is 1 during the walk. Each process
writes a file of its own: a line for each function of Holdfast that it enters, the first time in the walk.
It uses only modules of the standard library, because it runs before the program's own imports.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = tuple(
    f"{_ROOT}/{package}/src/" for package in ("core", "operator", "sidecar", "trainer_sdk", "cli")
)


class Recorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "recording").open("rb") as file:
            self._on = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._seen: dict[int, CodeType] = {}
        self._file = -1
        self._opening = threading.Lock()
        """Two threads must not both begin the file."""
        os.register_at_fork(after_in_child=self._begin_again)

    def _begin_again(self) -> None:
        """Begin a file of the forked process."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._opening = threading.Lock()
        self._seen = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._on[0]:
            return
        code = frame.f_code
        if id(code) in self._seen:
            return
        self._seen[id(code)] = code  # it stays alive, so that its id stays its own
        name = code.co_filename
        if not name.startswith(_SOURCES):
            return
        with self._opening:
            if self._file < 0:
                self._file = self._open()
        line = f"{time.monotonic_ns()}\t{name[len(str(_ROOT)) + 1 :]}\t{code.co_qualname}\n"
        os.write(self._file, line.encode())

    def _open(self) -> int:
        """Open the file of this process. Its first line says which process it is."""
        own = Path("/proc/self")
        words = f"{(own / 'comm').read_text()} {(own / 'cmdline').read_text()}"
        head = " ".join(words.replace("\0", " ").split()) + "\n"
        path = self._folder / f"{os.getpid()}.calls"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(file, head.encode())
        return file


if "HOLDFAST_TRACE" in os.environ:
    recorder = Recorder(Path(os.environ["HOLDFAST_TRACE"]))
    sys.setprofile(recorder.note)
    threading.setprofile(recorder.note)
