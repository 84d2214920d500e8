"""A program that the zygote forks behaves as one that is executed: both run, and all they show is equal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import is_alive, until

ROOT = Path(__file__).resolve().parents[2]
SHOW = """
import atexit, json, os, signal, sys, threading
import holdfast
def signals():
    return [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
def descriptors():
    return [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}")]
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"),
    "main": vars(sys.modules["__main__"]) is globals(),
    "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "directory": os.getcwd(),
    "environment": dict(os.environ), "command": open("/proc/self/cmdline").read().rstrip(chr(0)),
    "signals": signals(), "blocked": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": descriptors(), "threads": threading.active_count(), "umask": os.umask(0o22),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "torch": "torch" in sys.modules, "buffered": sys.stdout.line_buffering, "input": sys.stdin.read(),
}))
"""


def shown_by(start: Any, words: list[str], **options: Any) -> tuple[int, str, str]:
    done = start(
        [sys.executable, *words], capture_output=True, text=True, timeout=HANG_SECONDS, **options
    )
    return done.returncode, done.stdout, done.stderr


def expect_equal(words: list[str], **options: Any) -> tuple[int, str, str]:
    executed = shown_by(subprocess.run, words, **options)
    assert shown_by(zygote.run, words, **options) == executed
    return executed


def expect_same_surroundings(words: list[str], **options: Any) -> None:
    executed = shown_by(subprocess.run, words, **options)
    forked = shown_by(zygote.run, words, **options)
    assert executed[::2] == forked[::2] == (0, "")
    assert json.loads(forked[1]) == json.loads(executed[1])


def as_text(folder: Path) -> list[str]:
    return ["-c", SHOW, "one", "two words"]


def as_file(folder: Path) -> list[str]:
    (folder / "program.py").write_text(SHOW)
    return [str(folder / "program.py"), "one", ""]


def as_relative_file(folder: Path) -> list[str]:
    (folder / "program.py").write_text(SHOW)
    return ["program.py"]


def as_module(folder: Path) -> list[str]:
    (folder / "shown.py").write_text(SHOW)
    return ["-m", "shown", "one"]


def as_package(folder: Path) -> list[str]:
    (folder / "pack").mkdir()
    (folder / "pack/__init__.py").write_text("")
    (folder / "pack/__main__.py").write_text(SHOW)
    return ["-m", "pack", "one"]


@pytest.mark.parametrize("form", [as_text, as_file, as_relative_file, as_module, as_package])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"start_new_session": True, "umask": 0o77}, id="session"),
        pytest.param({"process_group": 0, "input": "a line\n"}, id="group"),
    ],
)
def test_a_program_finds_what_an_exec_gives_it(
    tmp_path: Path, form: Callable[[Path], list[str]], options: dict[str, Any]
) -> None:
    words = form(tmp_path)
    environment = {**os.environ, "HOLDFAST_X": "1", "PYTHONPATH": f"relative:{tmp_path}"}
    options = {"stdin": subprocess.DEVNULL, **options}
    if "input" in options:
        del options["stdin"]
    expect_same_surroundings(words, cwd=tmp_path, env=environment, **options)


@pytest.fixture
def other_signals() -> Iterator[None]:
    """Ignore and block signals in this process, which an executed program inherits."""
    ignored = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for number, handler in ignored.items():
        signal.signal(number, handler)


def test_a_program_inherits_ignored_and_blocked_signals(
    tmp_path: Path, other_signals: None
) -> None:
    # An exec without `env` passes what C code has set, too: readline sets LINES and COLUMNS.
    options = {"cwd": tmp_path, "env": dict(os.environ), "stdin": subprocess.DEVNULL}
    expect_same_surroundings(as_text(tmp_path), **options)


def test_a_program_gets_the_descriptors_that_are_passed_to_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"sent")
    program = f"import os; print(os.read({read}, 4), os.get_inheritable({read}))"
    with zygote.Popen(
        [sys.executable, "-c", program], pass_fds=[read], stdout=subprocess.PIPE
    ) as process:
        assert process.communicate()[0] == b"b'sent' True\n"
    assert process.forked
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a text')",
        "raise SystemExit(256 + 3)",
        "import os; os._exit(9)",
        "import os; os.kill(os.getpid(), 9)",
        "def f():\n    1 / 0\nf()",
        "raise KeyboardInterrupt",
        "import nothing_of_this_name",
        "this is no program",
        "import sys; sys.excepthook = lambda *_: print('hook'); 1 / 0",
        "import atexit; atexit.register(print, 'at exit'); print('main')",
        "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(3)",
        "import threading as t\n"
        "t.Thread(target=lambda: (t.main_thread().join(), print('thread'))).start()\nprint('main')",
        "class Kept:\n    def __del__(self):\n        print('deleted')\nkept = Kept()",
        "import sys; print('lost'); sys.stdout.flush(); sys.stderr.write('error'); sys.exit(2)",
        "import signal, os\nsignal.signal(15, lambda *_: print('got it'))\nos.kill(os.getpid(), 15)",
        "import os; os.close(1); print('nowhere')",
        "import multiprocessing as m\nprint(m.current_process().name, m.parent_process())",
        "import warnings; warnings.warn('a warning')",
        "import random, os; assert random.random() != random.Random(0).random()",
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "pool = P(2)\npool.submit(print, 'of the pool')",
        "import pickle, holdfast\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A)",
        "import asyncio\nasync def main():\n"
        "    p = await asyncio.create_subprocess_exec('sh', '-c', 'exit 5')\n"
        "    print(await p.wait())\nasyncio.run(main())",
    ],
)
def test_a_program_ends_as_an_executed_one(program: str) -> None:
    expect_equal(["-c", program])


def test_a_start_that_cannot_be_forked_is_executed() -> None:
    process: zygote.Popen[bytes]
    for command, options in (
        (["true"], {}),
        ([sys.executable, "-I", "-c", ""], {}),
        (f"{sys.executable} -c ''", {"shell": True}),
        ([sys.executable, "-c", ""], {"preexec_fn": lambda: None}),
    ):
        with zygote.Popen(command, **options) as process:
            assert process.wait() == 0
        assert not process.forked
    with pytest.raises(FileNotFoundError):
        zygote.Popen([sys.executable, "-c", ""], cwd="/nothing/of/this/name")


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_a_zygote_ends_with_its_worker(how: str) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom tests.support import zygote\n"
        "zygote.run([sys.executable, '-c', ''])\n"
        "print(Path('/proc/self/task', str(os.getpid()), 'children').read_text(), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        (pid,) = worker.stdout.readline().split()
        if how == "exits":
            worker.communicate("\n")
        worker.kill()
    until(lambda: not is_alive(int(pid)), "the zygote ends")


def test_a_program_has_its_session_when_its_start_returns() -> None:
    for _ in range(20):
        with zygote.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        ) as process:
            assert process.forked
            assert os.getpgid(process.pid) == process.pid
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
