"""The worker's side: `Popen` and `run`, which ask the zygote for a fork instead of an exec."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import types
from pathlib import Path
from typing import Any, AnyStr

from tests.support.zygote.helper import STATUS, zygotes
from tests.support.zygote.imports import preloads
from tests.support.zygote.start import Start, program_arguments

_DETAILS = list(inspect.signature(vars(subprocess.Popen)["_execute_child"]).parameters)[1:]
"""Names of the arguments of `_execute_child`, which depend on the version of Python."""


class Popen(subprocess.Popen[AnyStr]):
    """A process of subprocess.Popen that was forked, where that is possible, and not executed."""

    forked = False
    """Whether the zygote started the process."""
    _ended = -1
    """Pipe from which the process's status can be read when it has ended."""

    def __init__(
        self,
        *arguments: Any,
        launcher: int | None = None,
        executed: bool = False,
        **options: Any,
    ) -> None:
        """Start a process.

        Args:
            arguments: Arguments of subprocess.Popen.
            launcher: Connection that the process, a launcher, uses to fork its fork server.
            executed: Whether the process is executed in any case.
            options: Arguments of subprocess.Popen.
        """
        self._executed = executed
        self._launcher: int | None = launcher
        super().__init__(*arguments, **options)

    def _execute_child(self, *details: Any) -> None:
        how: dict[str, Any] = dict(zip(_DETAILS, details, strict=True))
        start = None if self._executed else _start(how, self._launcher)
        zygote = None if start is None else zygotes.of(start)
        if start is None or zygote is None:
            super()._execute_child(*details)  # type: ignore[misc]
            return
        self._ended, status = os.pipe()
        try:
            self.pid = zygote.fork(start, self._descriptors(how), status)
        finally:
            os.close(status)
        self.forked = self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(how[name] for name in pipes))  # type: ignore[attr-defined]

    def _descriptors(self, how: dict[str, Any]) -> list[int]:
        given: list[int] = [*_ends(how), *how["pass_fds"]]
        return given if self._launcher is None else [*given, self._launcher]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self.forked:
            found: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return found
        if not zygotes.usable:  # a forked copy of the worker, which must leave the status to it
            return self.pid, 0
        os.set_blocking(self._ended, not wait_flags & os.WNOHANG)
        try:
            status = os.read(self._ended, STATUS.size)
        except BlockingIOError:
            return 0, 0
        if not status:
            raise AssertionError(f"the zygote ended before process {self.pid}: {self.args!r}")
        os.close(self._ended)
        self._ended = -1
        return self.pid, STATUS.unpack(status)[0]

    def _internal_poll(self, *details: Any, **more: Any) -> int | None:
        if not self.forked:
            found: int | None = super()._internal_poll(*details, **more)  # type: ignore[misc]
            return found
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


def subprocess_with(popen: object) -> types.SimpleNamespace:
    """Return what stands for the module subprocess in a module whose starts go through `popen`."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def run(
    command: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what subprocess.run does."""
    if input is not None:
        how["stdin"] = subprocess.PIPE
    if capture_output:
        how["stdout"] = how["stderr"] = subprocess.PIPE
    process: Popen[Any]
    with Popen(command, **how) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _start(how: dict[str, Any], launcher: int | None) -> Start | None:
    """Return the start for the zygote, or None if only an exec can do what is asked for."""
    arguments = program_arguments(how["args"])
    directory = os.path.abspath(how["cwd"] or os.getcwd())
    environment = dict(os.environ if how["env"] is None else how["env"])
    descriptors = [0, 1, 2, *how["pass_fds"], *([] if launcher is None else [launcher])]
    only_exec = ("executable", "preexec_fn", "shell", "gid", "gids", "uid")
    if (
        arguments is None
        or not Path(directory).is_dir()
        or any(how[name] not in (None, False) for name in only_exec)
        or not how["close_fds"]
        or any(os.isatty(end) for end in _ends(how))
        or not zygotes.usable
    ):
        return None
    return Start(
        arguments,
        preloads(arguments, directory),
        environment,
        directory,
        descriptors,
        [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        how["umask"],
        how["start_new_session"],
        None if how["process_group"] == -1 else how["process_group"],
        launcher,
    )


def _ends(how: dict[str, Any]) -> list[int]:
    """Return the descriptors that become 0, 1 and 2 of the process."""
    given = (how["p2cread"], how["c2pwrite"], how["errwrite"])
    return [inherited if end == -1 else end for inherited, end in enumerate(given)]
