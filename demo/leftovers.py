"""Clean-up of local demos, and the lock that allows one demo per folder.

Every process that a local demo starts has the folder's mark in its environment. A guardian process waits
for the end of the demo, even by SIGKILL, and kills every process that still has the mark.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from demo.waits import DemoFailed

MARK = "HOLDFAST_DEMO_FOLDER"
MADE_BY_DEMO = ".holdfast-demo"
"""Name of the marker file. The next demo deletes only a folder that contains it."""


class Claim:
    """Context manager that holds the lock of a local demo in `folder`, whose processes use `memory`.

    On entry it kills the processes and deletes the files that an earlier demo of the folder has left, and
    starts the guardian. Raises DemoFailed if another demo holds the lock, or if the folder exists and was
    not created by a demo.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        self._folder = folder
        self._memory = memory
        self._lock: IO[str] | None = None
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        path = self._folder.with_name(f"{self._folder.name}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise DemoFailed(
                f"Another demo runs in {self._folder}: wait for it, or end its process.",
                f"process {holder} holds {path}",
                str(self._folder),
            ) from error
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        if self._folder.exists() and not (self._folder / MADE_BY_DEMO).exists():
            self._lock.close()
            raise DemoFailed(
                f"{self._folder} was not created by a demo, and the demo would delete it.",
                f"it exists and has no file {MADE_BY_DEMO}",
                "none yet; delete the folder, or choose another with --folder",
            )
        clear(self._folder, self._memory)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (self._folder / MADE_BY_DEMO).touch()
        self._memory.mkdir(mode=0o700, parents=True)
        # The guardian has its own session, so that Ctrl-C does not reach it. It reads the pipe until this
        # process ends.
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", "demo.leftovers", str(self._folder), str(self._memory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.environ[MARK] = str(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.environ.pop(MARK, None)
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
            self._guardian.wait()
        if self._lock is not None:
            self._lock.close()


def clear(folder: Path, memory: Path) -> None:
    """Kill every process that has the mark of `folder`, and delete its shared memory."""
    while pids := marked(folder):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    shutil.rmtree(memory, ignore_errors=True)


def marked(folder: Path) -> list[int]:
    """Return the ids of all other running processes that a demo of `folder` has started, directly or not."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it has ended, or belongs to another user
        if wanted in environment and state not in ("Z", "X"):
            found.append(int(entry.name))
    return found


def main() -> None:
    """Wait for the end of the demo, then clean up. This is the guardian process."""
    sys.stdin.buffer.read()
    clear(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
