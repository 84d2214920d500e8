"""Runs a function in a child process under ptrace and can kill the child, or fail the call, at any system
call that changes a file.

It needs Linux 5.3 or later (PTRACE_GET_SYSCALL_INFO) on x86-64 or aarch64, and the user who owns the child.
The calling process must have no other children, because the tracer waits for every child. A seccomp filter
stops the child at the traced calls only; all others run at full speed. The child must not start processes:
they would inherit the filter without its tracer, and their traced calls would fail with ENOSYS.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests.support.crash.syscalls import NAMES, Call, read_call
from tests.support.crash.write_orders import (
    ROOT,
    Acknowledged,
    Create,
    Link,
    Op,
    Remove,
    Rename,
    Resize,
    Sync,
    Write,
)

Announce = Callable[[str], None]
Program = Callable[[Announce], None]

_TRACEME, _POKEUSER, _CONTINUE, _SYSCALL = 0, 6, 7, 24
_SETOPTIONS, _GET_SYSCALL_INFO = 0x4200, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x80 | 0x100000
"""PTRACE_O_TRACESYSGOOD, TRACECLONE, TRACESECCOMP and EXITKILL."""
_SECCOMP_EVENT = 7
_ALL_THREADS = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_EXIT, _FILTERED = 2, 3
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2
_LOAD_NUMBER = (0x20, 0, 0, 0)
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_STOP_HERE, _ALLOW = 0x7FF00000, 0x7FFF0000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def can_trace() -> str | None:
    """Return why system calls cannot be traced on this machine, or None if they can."""
    if sys.platform != "linux" or platform.machine() not in NAMES:
        return f"no table of system calls for {sys.platform} on {platform.machine()}"
    return None


_RESULT_REGISTER, _NUMBER_REGISTER = 10 * 8, 15 * 8
"""Offsets of rax and orig_rax in the user area of x86-64."""


def can_fail_calls() -> str | None:
    """Return why system calls cannot be made to fail on this machine, or None if they can.

    The register offsets are those of x86-64.
    """
    if platform.machine() != "x86_64":
        return f"system calls of {platform.machine()} cannot be made to fail"
    return can_trace()


@dataclass(frozen=True, slots=True)
class Strike:
    """Kill or error that hits the `at`-th call below the scope, counted from 1, before the kernel executes
    it.
    """

    at: int
    error: int | None = None
    """The errno with which the call fails without an effect; None for a SIGKILL of the child."""
    for_ever: bool = False
    """Whether all later calls fail as well, as on a full or read-only file system."""

    def hits(self, number: int) -> bool:
        return number == self.at or (self.for_ever and number > self.at)


class _Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


class _Info(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * 8),
    )


@dataclass(slots=True)
class Recorder:
    """Recorder of the changes below `root`, as a log for `write_orders`.

    One recorder may follow several programs that run one after the other in the same directory.
    """

    root: Path
    ignored: tuple[str, ...] = ()
    """Paths below the root that are left out of the log because no durability depends on them."""
    log: list[Op] = field(default_factory=list)
    _inodes: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inodes[_identity(self.root)] = ROOT

    def covers(self, path: str) -> bool:
        below = path.removeprefix(f"{self.root}/")
        if any(below == name or below.startswith(f"{name}/") for name in self.ignored):
            return False
        return path == str(self.root) or below != path

    def done(self, call: Call, result: int) -> None:
        """Append a successful call to the log.

        Raises AssertionError for a call that the model does not support.
        """
        path, name = call.path, Path(call.path).name
        match call.name:
            case "openat":
                if call.creates:
                    self._created(path, directory=False)
                elif call.truncates:
                    self.log.append(Resize(self._of(path), 0, shrinks=True))
            case "mkdirat":
                self._created(path, directory=True)
            case "write" | "pwrite64":
                self.log.append(Write(call.inode(self._inodes), call.offset, call.data[:result]))
            case "ftruncate":
                self.log.append(Resize(call.inode(self._inodes), call.offset, shrinks=True))
            case "fallocate":
                self.log.append(Resize(call.inode(self._inodes), call.offset, shrinks=False))
            case "fsync" | "fdatasync":
                self.log.append(Sync(call.inode(self._inodes)))
            case "renameat":
                target = Path(call.to_path)
                inode = self._of(call.to_path)
                self.log.append(
                    Rename(self._parent(path), name, self._parent(call.to_path), target.name, inode)
                )
            case "linkat":
                target = Path(call.to_path)
                inode = self._of(call.to_path)
                self.log.append(Link(self._parent(call.to_path), target.name, inode))
            case "unlinkat":
                self.log.append(Remove(self._parent(path), name))
            case "flock" | "fchmod" | "fchmodat":
                pass  # changes nothing that is read after a power cut
            case _:
                raise AssertionError(f"the model of power cuts does not know {call}")

    def _created(self, path: str, *, directory: bool) -> None:
        inode = 1 + sum(isinstance(op, Create) for op in self.log)
        self._inodes[_identity(Path(path))] = inode  # the file system reuses inode numbers
        self.log.append(Create(self._parent(path), Path(path).name, inode, directory))

    def _parent(self, path: str) -> int:
        return self._inodes[_identity(Path(path).parent)]

    def _of(self, path: str) -> int:
        return self._inodes[_identity(Path(path))]


@dataclass(frozen=True, slots=True)
class Outcome:
    struck: bool
    acknowledged: tuple[str, ...]
    calls: tuple[str, ...]
    """The changes below the scope that were begun, as text; a kill prevents the last one."""


def run(
    program: Program,
    scope: Path,
    *,
    strike: Strike | None = None,
    recorder: Recorder | None = None,
) -> Outcome:
    """Run `program` in a forked child until it ends or `strike` kills it.

    Only calls that change something below `scope` count for `strike`. Raises AssertionError if the program
    fails for another reason.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _child(program, writes)
    try:
        os.close(writes)
        tracer = _Tracer(pid, writes, scope.resolve(), strike, recorder)
        code = tracer.follow()
        with open(reads, closefd=False) as pipe:
            acknowledged = tuple(pipe.read().splitlines())
    finally:
        os.close(reads)
    if code != (-signal.SIGKILL if tracer.killed else 0):
        raise AssertionError(f"the traced program ended with {code} after {tracer.calls[-3:]}")
    return Outcome(tracer.struck, acknowledged, tuple(tracer.calls))


def _child(program: Program, acknowledged: int) -> NoReturn:
    try:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _stop_at(NAMES[platform.machine()])
        program(lambda text: _acknowledge(acknowledged, text))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the exit code reports it; the child must not run the parent's code
        traceback.print_exc()
        os._exit(1)


def _stop_at(numbers: Iterable[int]) -> None:
    """Install a seccomp filter that stops this process for its tracer at these system calls."""
    lines = [_LOAD_NUMBER]
    for number in numbers:
        lines += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _STOP_HERE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Filter(len(lines), code)
    _prctl(_SET_NO_NEW_PRIVS, 1, 0)
    _prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(program))


def _prctl(option: int, value: int, address: int) -> None:
    text = [ctypes.c_ulong(word) for word in (value, address, 0, 0)]
    if _libc.prctl(option, *text) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def _acknowledge(acknowledged: int, text: str) -> None:
    os.write(acknowledged, f"{text}\n".encode())


class _Tracer:
    def __init__(
        self,
        pid: int,
        acknowledged: int,
        scope: Path,
        strike: Strike | None,
        recorder: Recorder | None,
    ) -> None:
        self._pid = pid
        self._acknowledged = acknowledged
        self._scope = str(scope)
        self._strike = strike
        self._recorder = recorder
        self._under_way: tuple[int, Call] | None = None
        """The thread whose call is in the kernel, and that call. Only one call runs at a time: a second
        thread could otherwise rename a new file, or remove it, before the recorder has looked at it."""
        self._held: deque[int] = deque()
        """Threads that wait before a call until the one under way has been recorded."""
        self._numbers = NAMES[platform.machine()]
        self._failing: set[int] = set()
        self.calls: list[str] = []
        self.struck = False

    @property
    def killed(self) -> bool:
        return self.struck and self._strike is not None and self._strike.error is None

    def follow(self) -> int:
        """Trace the child to its end and return its exit code, negative for a signal."""
        os.waitpid(self._pid, 0)
        _ptrace(_SETOPTIONS, self._pid, 0, _OPTIONS)
        _ptrace(_CONTINUE, self._pid)
        known = {self._pid}
        while True:
            thread, status = os.waitpid(-1, _ALL_THREADS)
            if not os.WIFSTOPPED(status):
                if thread == self._pid:
                    return os.waitstatus_to_exitcode(status)
                continue
            number, event = os.WSTOPSIG(status), status >> 16
            deliver = 0
            if number == _SYSCALL_STOP or event == _SECCOMP_EVENT:
                if event and self._under_way is not None:
                    self._held.append(thread)
                    continue
                if not self._stopped(thread):
                    continue
            elif number == signal.SIGSTOP and thread not in known:
                known.add(thread)  # a new thread starts with a SIGSTOP
            elif not event:
                deliver = number
            self._resume(thread, deliver)
            while self._held and self._under_way is None:
                held = self._held.popleft()
                if self._stopped(held):
                    self._resume(held)

    def _resume(self, thread: int, deliver: int = 0) -> None:
        awaited = thread in self._failing or (
            self._under_way is not None and self._under_way[0] == thread
        )
        with suppress(ProcessLookupError):  # the thread was killed in the meantime
            _ptrace(_SYSCALL if awaited else _CONTINUE, thread, 0, deliver)

    def _stopped(self, thread: int) -> bool:
        """Handle a stop of `thread`. Returns False if the thread must stay stopped because it is
        killed."""
        info = _Info()
        try:
            _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
        except ProcessLookupError:
            return True
        if info.op == _FILTERED:
            name = self._numbers.get(info.words[0])
            if name is not None and not self.killed:
                self._entered(thread, name, tuple(info.words[1:7]))
        elif info.op == _EXIT and thread in self._failing:
            self._failing.remove(thread)
            assert self._strike is not None and self._strike.error is not None
            _ptrace(_POKEUSER, thread, _RESULT_REGISTER, -self._strike.error)
        elif info.op == _EXIT and self._under_way is not None and self._under_way[0] == thread:
            call, self._under_way = self._under_way[1], None
            result = ctypes.c_int64(info.words[0]).value
            if result >= 0 and self._recorder is not None:
                self._left(call, result, self._recorder)
        if self.killed:
            os.kill(self._pid, signal.SIGKILL)
        return not self.killed

    def _entered(self, thread: int, name: str, arguments: tuple[int, ...]) -> None:
        call = read_call(self._pid, name, arguments)
        if call is None:
            return
        if call.descriptor == self._acknowledged and call.name == "write":
            self._under_way = thread, call
            return
        if call.path != self._scope and not call.path.startswith(f"{self._scope}/"):
            return
        self.calls.append(f"{call.name} {call.path.removeprefix(self._scope)}")
        if self._strike is None or not self._strike.hits(len(self.calls)):
            if call.name != "flock":  # it changes nothing and may wait for a stopped thread
                self._under_way = thread, call
            return
        self.struck = True
        if self._strike.error is not None:
            _ptrace(_POKEUSER, thread, _NUMBER_REGISTER, -1)
            self._failing.add(thread)

    def _left(self, call: Call, result: int, recorder: Recorder) -> None:
        if call.descriptor == self._acknowledged and call.name == "write":
            recorder.log.append(Acknowledged(call.data.decode().strip()))
        elif recorder.covers(call.path):
            recorder.done(call, result)


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x} of {pid}: {os.strerror(number)}")


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
