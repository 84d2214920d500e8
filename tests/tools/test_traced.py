"""The calls of several threads are recorded one at a time, in the order in which they took effect."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.crash.syscalls import Call
from tests.support.crash.traced import Announce, Recorder, can_trace, run
from tests.support.crash.write_orders import Create, Remove, Rename
from tests.support.hang import HANG_SECONDS

pytestmark = pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))
FILES = 300


class SlowRecorder(Recorder):
    """Recorder that gives all threads the time to reach their next call."""

    def done(self, call: Call, result: int) -> None:
        time.sleep(0.001)
        super().done(call, result)


def hand_over(folder: Path) -> None:
    """Rename files into place in one thread and remove each at once in another, while others write."""
    ready = folder / "ready"
    ready.mkdir()
    created = threading.Semaphore(0)

    def take() -> None:
        for number in range(FILES):
            while not (ready / str(number)).exists():
                pass
            (ready / str(number)).unlink()

    def write() -> None:
        with (folder / "written").open("wb", buffering=0) as output:
            for _ in range(FILES):
                created.acquire()
                output.write(b"x")
                output.write(b"y")

    threads = [
        threading.Thread(target=write),
        threading.Thread(target=take),  # the newest thread, which the kernel reports first
    ]
    for thread in threads:
        thread.start()
    for number in range(FILES):
        file = folder / f"{number}.new"
        file.touch()
        created.release()
        file.rename(ready / str(number))
    for thread in threads:
        thread.join()


def main(folder: Path) -> None:
    """Print the recorded calls. The tracer waits for every child, so it needs a process without others."""
    recorder = SlowRecorder(folder.resolve())

    def program(_: Announce) -> None:
        sys.setswitchinterval(1e-5)
        hand_over(folder)

    run(program, folder, recorder=recorder)
    print(json.dumps([type(op).__name__ for op in recorder.log]))


def test_a_file_that_another_thread_removes_at_once_is_recorded_before(tmp_path: Path) -> None:
    """Without an order, the recorder looked for a renamed file that another thread had just taken."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind in (Create, Rename, Remove):
        assert found.count(kind.__name__) == FILES + (2 if kind is Create else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
