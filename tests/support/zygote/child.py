"""What a forked child does to become a program as an exec of the interpreter would start it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import random
import runpy
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import NoReturn

from tests.support.zygote.start import Start

_IGNORED_BY_PYTHON = frozenset({signal.SIGPIPE, signal.SIGXFSZ})
_OWN_FILES = (__file__, str(Path(__file__).with_name("server.py")))
_FLUSH_FAILED = 120
"""Exit status of Python if the standard output cannot be flushed."""


@dataclass(frozen=True, slots=True)
class Child:
    start: Start
    given: Sequence[int]
    """Descriptors in the order of `start.descriptors`."""


@dataclass(slots=True)
class _CommandLine:
    """The memory of the zygote's command line, which /proc shows."""

    address: int = 0
    size: int = 0


_command_line = _CommandLine()


def note_command_line(room: int) -> None:
    """Find the memory of this process's command line, whose last argument leaves `room` for longer ones."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    assert end - begin > room
    _command_line.address, _command_line.size = begin, end - begin


def take_session(start: Start) -> None:
    """Begin the session or the process group, in which a signal of the starter must find the child."""
    if start.new_session:
        os.setsid()
    if start.process_group is not None:
        os.setpgid(0, start.process_group)


def be_program(child: Child) -> NoReturn:
    """Run the program as `__main__`, and exit as the interpreter does."""
    start = child.start
    _take_descriptors(start.descriptors, child.given)
    if start.umask >= 0:
        os.umask(start.umask)
    os.chdir(start.directory)
    _take_signals(start)
    _show([sys.executable, *start.arguments])
    paths_before = _python_path()
    os.environ.clear()
    os.environ.update(start.environment)
    time.tzset()
    importlib.invalidate_caches()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    added = _python_path()
    sys.path[:] = ["", *added, *(p for p in sys.path[1 + len(paths_before) :] if p not in added)]
    _exit(_run(start))


def _take_descriptors(numbers: Sequence[int], given: Sequence[int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in given]
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _take_signals(start: Start) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in start.ignored:
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif signal.getsignal(number) is signal.SIG_IGN and number not in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)


def _show(command: Sequence[str]) -> None:
    text = b"".join(os.fsencode(word) + b"\0" for word in command)[: _command_line.size]
    ctypes.memset(_command_line.address, 0, _command_line.size)
    ctypes.memmove(_command_line.address, text, len(text))
    sys.orig_argv = list(command)


def _python_path() -> list[str]:
    """Return the entries of PYTHONPATH as the interpreter puts them into sys.path."""
    text = os.environ.get("PYTHONPATH", "")
    return list(dict.fromkeys(map(os.path.abspath, text.split(os.pathsep)))) if text else []


def _run(start: Start) -> int:
    """Run the program and return its exit status."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    try:
        _customize()
        if start.launcher is not None:
            from tests.support.zygote.launcher import fork_fork_servers

            fork_fork_servers(start.launcher)
        kind, *rest = start.arguments
        match kind:
            case "-m":
                sys.argv = ["-m", *rest[1:]]
                sys.path[0] = start.directory
                for name in (rest[0], f"{rest[0]}.__main__"):
                    if not hasattr(sys.modules.get(name), "__path__"):
                        sys.modules.pop(name, None)
                runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
            case "-c":
                sys.argv = ["-c", *rest[1:]]
                exec(compile(rest[0], "<string>", "exec"), main.__dict__)
            case _:
                sys.argv = [kind, *rest]
                path = str(Path(kind).resolve())
                sys.path[0] = os.path.dirname(path)
                main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
                text = Path(path).read_bytes()
                exec(compile(text, path, "exec"), main.__dict__)
    except SystemExit as error:
        return _status(error)
    except KeyboardInterrupt:
        sys.excepthook(*_trimmed())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _finish()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - printed as the interpreter prints it
        sys.excepthook(*_trimmed())
        return 1
    return 0


def _customize() -> None:
    """Import the `sitecustomize` of a directory that the program's PYTHONPATH adds."""
    entries = _python_path()
    if any(Path(entry, "sitecustomize.py").is_file() for entry in entries):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _trimmed() -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    """Return the current exception without the frames of the zygote."""
    kind, error, trace = sys.exc_info()
    assert kind is not None and error is not None
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return kind, error.with_traceback(trace), trace


def _finish() -> int:
    """Do what the interpreter does at its end: threads, `atexit`, the objects of `__main__`, output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    status = 0
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                status = _FLUSH_FAILED
    return status


def _exit(status: int) -> NoReturn:
    flushed = 1
    try:
        flushed = _finish()
    finally:
        os._exit(flushed or status)
