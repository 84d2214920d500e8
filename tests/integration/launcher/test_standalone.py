"""`holdfast run` on one machine: exit codes, prefixes, environment, signals and cleanup."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.trainer.launched import Launched, children_of, is_alive, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]  # many starts of torch


def script(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "program.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hide torch from the launcher. Few of these tests need it, and its import dominates their time."""
    directory = tmp_path_factory.mktemp("no-torch")
    (directory / "torch.py").write_text("raise ModuleNotFoundError(__name__, name=__name__)\n")
    return {"PYTHONPATH": str(directory)}


def run(
    directory: Path,
    options: list[str],
    command: list[str],
    environment: Mapping[str, str] | None = None,
) -> Launched:
    with Launched(directory, options, command, environment or {}) as launched:
        launched.wait()
    return launched


def test_ranks_receive_their_rank_and_world_size(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import os, sys, threading\n"
        "print(__name__, sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'],\n"
        "      os.environ['LOCAL_RANK'], os.environ['HOLDFAST_ROUND'], threading.active_count(),\n"
        "      open('/proc/self/comm').read().strip())\n"
        "assert 'torch' in sys.modules, 'nothing was preloaded'\n",
    )
    done = run(tmp_path, ["--nproc-per-node", "2"], ["python", str(program), "--lr", "1"])
    assert done.process.returncode == 0, done.err()
    assert sorted(done.out().splitlines()) == [
        "[rank 0] __main__ ['--lr', '1'] 0 2 0 0 1 holdfast-rank0",
        "[rank 1] __main__ ['--lr', '1'] 1 2 1 0 1 holdfast-rank1",
    ]


@pytest.mark.fault("A library reports leaks at the end of a process whose objects were preloaded")
@pytest.mark.parametrize("body", ["", "raise ValueError('no luck')"], ids=["success", "failure"])
def test_a_user_reads_only_the_output_of_the_script(tmp_path: Path, body: str) -> None:
    program = script(tmp_path, body)
    with Launched(tmp_path, [], ["python", str(program)], executed=True) as launched:
        launched.wait()
    foreign = [
        line
        for line in launched.err().splitlines()
        if not line.startswith(("[holdfast]", "[rank 0]")) or "leaked" in line
    ]
    assert foreign == []
    assert ("no luck" in launched.err()) is bool(body)


def test_a_gang_meets_over_env(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(1) * (dist.get_rank() + 1); dist.all_reduce(t)\n"
        "print('sum', t.item(), os.environ['HOLDFAST_ROUND'])\n"
        "if os.environ['HOLDFAST_ROUND'] == '0':\n"
        "    # Without its peer the other rank fails, maybe before the launcher has seen the first end.\n"
        "    os._exit(5) if dist.get_rank() == 1 else time.sleep(600)\n"
        "dist.barrier(); dist.destroy_process_group()\n",
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = run(tmp_path, options, [sys.executable, str(program)])
    assert done.process.returncode == 0, done.err()
    assert done.out().count("sum 3.0 1") == 2
    assert "rank 1 ended with code 5 in round 0" in done.err()


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        pytest.param("raise ValueError('no luck')", 1, "ValueError: no luck", id="exception"),
        pytest.param("import sys; sys.exit(7)", 7, "", id="exit-code"),
        pytest.param("import os; os.kill(os.getpid(), 9)", 137, "", id="signal"),
        pytest.param("import sys; sys.exit('bye')", 1, "bye", id="exit-words"),
    ],
)
def test_exit_codes(tmp_path: Path, light: dict[str, str], body: str, code: int, text: str) -> None:
    done = run(tmp_path, [], ["python", str(script(tmp_path, body))], light)
    assert done.process.returncode == code
    assert text in done.err()


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        pytest.param(["sh", "-c", "echo $RANK of $WORLD_SIZE"], 0, "0 of 1", id="shell"),
        pytest.param(["no-such-command"], 127, "no such command", id="not-there"),
        pytest.param(["python", "-c", "print(6 * 7)"], 0, "42", id="inline-python"),
        pytest.param(["python", "-m", "this"], 0, "Beautiful", id="module"),
    ],
)
def test_any_command(
    tmp_path: Path, light: dict[str, str], command: list[str], code: int, text: str
) -> None:
    done = run(tmp_path, [], command, light)
    assert done.process.returncode == code, done.err()
    assert text in done.out() + done.err()


def test_the_output_of_ranks_goes_to_files(tmp_path: Path, light: dict[str, str]) -> None:
    program = script(
        tmp_path,
        "import os, sys\n"
        "print('out', os.environ['RANK'], flush=True)\n"
        "print('err', os.environ['RANK'], file=sys.stderr, flush=True)\n"
        "if os.environ['HOLDFAST_ROUND'] == '0' and os.environ['RANK'] == '0': sys.exit(3)\n",
    )
    options = [
        *("--nproc_per_node=2", "--max_restarts", "1", "--rdzv_id", "mine"),
        *("--log_dir", str(tmp_path / "logs"), "-r", "1:3", "--tee", "0:1"),
    ]
    done = run(tmp_path, options, [str(program)], light)
    assert done.process.returncode == 0, done.err()
    assert done.out().splitlines() == ["[rank 0] out 0"] * 2
    assert "[rank 1]" not in done.err()
    assert done.err().count("[rank 0] err 0") == 2
    last = tmp_path / "logs/mine/attempt_1"
    files = {str(path.relative_to(last)): path.read_text() for path in last.glob("*/*")}
    assert files == {
        "0/stdout.log": "out 0\n",
        "1/stdout.log": "out 1\n",
        "1/stderr.log": "err 1\n",
    }


def test_a_folder_for_logs_that_cannot_be_written_is_named(
    tmp_path: Path, light: dict[str, str]
) -> None:
    (tmp_path / "logs").write_text("a file")
    options = ["--log-dir", str(tmp_path / "logs"), "--tee", "3"]
    done = run(tmp_path, options, ["python", "-m", "this"], light)
    assert done.process.returncode == 1
    assert f"--log-dir {tmp_path}/logs" in done.err()


def test_a_module_that_starts_threads_cannot_be_preloaded(
    tmp_path: Path, light: dict[str, str]
) -> None:
    (tmp_path / "threading_thing.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with Launched(
        tmp_path,
        ["--preload", "threading_thing"],
        ["python", "-m", "this"],
        {"PYTHONPATH": f"{tmp_path}:{light['PYTHONPATH']}"},
    ) as launched:
        assert launched.wait() == 1
    assert "threading_thing" in launched.err()


SLOW = (
    "import os, pathlib, sys, time\n"
    "pathlib.Path(sys.argv[1], 'rank' + os.environ['RANK']).write_text(f'1 {os.getpid()}')\n"
    "time.sleep(600)\n"
)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 143, id="sigterm"),
        pytest.param(signal.SIGINT, 130, id="sigint"),
        pytest.param(signal.SIGKILL, -9, id="sigkill"),
    ],
)
def test_no_process_outlives_the_launcher(
    tmp_path: Path, light: dict[str, str], number: signal.Signals, code: int
) -> None:
    program = script(tmp_path, SLOW)
    progress = tmp_path / "progress"
    command = ["python", str(program), str(progress)]
    options = ["--nproc-per-node", "2"]
    with Launched(tmp_path, options, command, light, executed=True) as launched:
        until(lambda: launched.step_of(0) == launched.step_of(1) == 1, "both ranks run")
        processes = children_of(launched.process.pid)
        os.kill(launched.process.pid, number)
        assert launched.wait() == code
        until(lambda: not any(map(is_alive, processes)), "everything is gone")


@pytest.mark.fault("The terminal of `holdfast run` is closed")
def test_the_ranks_may_save_when_the_terminal_is_closed(
    tmp_path: Path, light: dict[str, str]
) -> None:
    saves = (
        "import pathlib, signal, sys\n"
        "def save(*_): pathlib.Path(sys.argv[1], 'saved').touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
    )
    program = script(tmp_path, saves + SLOW)
    command = ["python", str(program), str(tmp_path / "progress")]
    with Launched(tmp_path, [], command, light, executed=True) as launched:
        until(lambda: launched.step_of(0) == 1, "the rank runs")
        server = children_of(launched.process.pid)[0]
        for pid in (server, launched.process.pid):  # the process group of a terminal
            os.kill(pid, signal.SIGHUP)
        assert launched.wait() == 129
    assert (tmp_path / "progress/saved").exists()


def test_a_rank_that_does_not_listen_is_killed_after_the_grace(
    tmp_path: Path, light: dict[str, str]
) -> None:
    program = script(tmp_path, "import signal\nsignal.signal(15, lambda *_: None)\n" + SLOW)
    command = ["python", str(program), str(tmp_path / "progress")]
    with Launched(tmp_path, ["--shutdown-timeout", "0.2"], command, light) as launched:
        until(lambda: launched.step_of(0) == 1, "the rank runs")
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait() == 143


def test_the_fork_server_may_be_killed(tmp_path: Path, light: dict[str, str]) -> None:
    command = ["python", str(script(tmp_path, SLOW)), str(tmp_path / "progress")]
    with Launched(tmp_path, [], command, light, executed=True) as launched:
        until(lambda: launched.step_of(0) == 1, "the rank runs")
        processes = children_of(launched.process.pid)
        server = processes[0]
        os.kill(server, signal.SIGKILL)
        assert launched.wait() == 1
        until(lambda: not any(map(is_alive, processes)), "everything is gone")
    assert "fork server ended" in launched.err()


STRANGER = """
import logging, os, sys, threading, torch, holdfast
import torch.distributed as dist

def forge():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    for prefix in ("", "holdfast/0/0/"):
        for number in range(30):
            store.set(f"{prefix}proposal/{number}", '[0, 15, "stop", 0]')
            store.set(f"{prefix}decision/{number}", "accepted")
    return store

class Reported(logging.Handler):
    event = threading.Event()

    def emit(self, record):
        if "another process on the network" in record.getMessage():
            self.event.set()

logging.getLogger("holdfast").addHandler(Reported())
logging.getLogger("holdfast").addHandler(logging.StreamHandler())

dist.init_process_group("gloo")
assert "HOLDFAST_STORE_SECRET" in os.environ
stranger = forge()
t = torch.zeros(4)
with holdfast.Checkpointer(dir=sys.argv[1], interval_steps=5, when_busy="wait") as ckpt:
    for index in ckpt.steps(20, {"t": t}):
        t += 1
        dist.barrier()
        if index == 10:
            forge()
            assert Reported.event.wait()
    assert not ckpt.stopping
assert t[0] == 20, t
print("done", flush=True)
"""


@pytest.mark.fault("A stranger writes into the gang's store")
def test_a_connection_without_the_secret_cannot_stop_a_gang(tmp_path: Path) -> None:
    program = script(tmp_path, STRANGER)
    command = ["python", str(program), str(tmp_path / "ckpt")]
    done = run(tmp_path, ["--nproc-per-node", "2"], command)
    assert done.process.returncode == 0, done.err()
    assert sorted(done.out().splitlines()) == ["[rank 0] done", "[rank 1] done"]
    assert done.err().count("another process on the network") == 2  # each rank reports it once
