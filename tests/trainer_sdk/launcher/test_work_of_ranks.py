"""Which ranks count as at work, shown with real processes: honest work of many kinds, and waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.launcher.stacks import STACK_SIGNAL, Watched, find
from holdfast_core.ids import Rank
from holdfast_core.messages.schema import RankStack

RANK = """
import faulthandler, hashlib, os, socket, subprocess, sys, tempfile, threading, time
faulthandler.register({signal}, file={file}, all_threads=True)
def begins():
    os.write(1, b"x")
def spin():
    while True: pass
PROGRAM = "import os; os.write(1, b'x')\\nwhile True: pass"
{work}
"""
AT_WORK = {
    "a loop of one line": "begins(); spin()",
    "one long call into C": "begins(); hashlib.pbkdf2_hmac('sha256', b'p', b's', 2**31 - 1)",
    "a program that it has started": "subprocess.run([sys.executable, '-c', PROGRAM])",
    "a program that a program has started": (
        "subprocess.run(['sh', '-c', '\"$0\" -c \"$1\"; true', sys.executable, PROGRAM])"
    ),
    "a download": (
        "a, b = socket.socketpair()\n"
        "def send():\n"
        "    while True:\n"
        "        b.sendall(b'x' * 100); time.sleep(0.002)\n"
        "threading.Thread(target=send, daemon=True).start()\n"
        "begins()\n"
        "while True: a.recv(100)"
    ),
    "a poll": "begins()\nwhile True: time.sleep(0.005)",
    "a file that it writes": (
        "f = open(tempfile.mkstemp()[1], 'wb', 0); os.unlink(f.name); begins()\n"
        "while True: f.seek(0); f.write(bytes(2**16)); time.sleep(0.1)"
    ),
    "different places": (
        "begins()\nfor n in range(10**6): exec(compile('time.sleep(0.3)', f'place{n}.py', 'exec'))"
    ),
}
WAITS = (
    "exec(compile('import time; begins(); time.sleep(3600)', '/x/torch/distributed/c.py', 'exec'))"
)
SPINS = "exec(compile('begins()\\nwhile True: pass', '/x/torch/distributed/c.py', 'exec'))"


@contextmanager
def rank(work: str) -> Iterator[Watched]:
    """Run a rank until the block ends. It has begun its work when the block begins."""
    file = os.memfd_create("stacks")
    program = RANK.format(signal=int(STACK_SIGNAL), file=file, work=work)
    # A session of its own, so that the programs that it starts end with it.
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=(file,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout.read(1) == b"x"
        yield Watched(Rank(0), process.pid, file)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        os.close(file)


async def look_at(watched: Watched) -> RankStack:
    [found] = await find([watched])
    return found.stack


@pytest.mark.fault("Ranks work for minutes without a step, unannounced")
@pytest.mark.parametrize("kind", AT_WORK)
async def test_honest_work_counts_as_work(kind: str) -> None:
    with rank(AT_WORK[kind]) as watched:
        while not (stack := await look_at(watched)).moves:
            pass  # the machine stood still between the two looks
        assert not (stack.waits or stack.stopped)


async def test_a_rank_that_only_waits_is_not_at_work() -> None:
    with rank("begins(); time.sleep(3600)") as watched:
        while not (stack := await look_at(watched)).is_known or stack.moves:
            pass  # it had not reached its last call yet, or the machine stood still
        assert not (stack.waits or stack.stopped)


@pytest.mark.parametrize("code", [WAITS, SPINS], ids=["asleep", "spinning"])
async def test_a_rank_that_waits_for_others_is_not_at_work(code: str) -> None:
    with rank(code) as watched:
        while not (stack := await look_at(watched)).waits or stack.moves:
            pass  # it had not reached its wait yet at the first of the two looks
        assert not stack.stopped


async def test_a_stopped_rank_is_reported_as_stopped() -> None:
    with rank("begins(); spin()") as watched:
        os.kill(watched.pid, signal.SIGSTOP)
        while not (stack := await look_at(watched)).stopped:
            pass  # the signal has not arrived yet
        assert not (stack.moves or stack.is_known)
        os.kill(watched.pid, signal.SIGCONT)
