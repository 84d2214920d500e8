"""The Checkpointer over a folder: restored bytes equal the saved ones, whichever process is killed at any
time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import zygote
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import (
    children_of,
    committed_step,
    is_alive,
    persisters_of,
    stop,
    until,
)

import holdfast
from holdfast.places import folder, place
from holdfast.slots.staging import Slot, SlotRing
from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    SaveFailedError,
    StateMismatchError,
    UnavailableError,
    UnsupportedStateError,
)

PROGRAM = """
import sys, holdfast, numpy as np
directory, steps = sys.argv[1], int(sys.argv[2])
state = {"w": np.zeros(1 << 18), "n": {"sum": 0}}
with holdfast.Checkpointer(holdfast.Folder(directory, keep_last=2), interval_steps=1) as ckpt:
    for index in ckpt.steps(steps, state):
        assert state["w"][0] == state["w"][-1] == index, (state["w"], index)
        assert state["n"]["sum"] == index * (index - 1) // 2
        state["w"] += 1
        state["n"]["sum"] += index
        print(index + 1, flush=True)
"""


def saved(tmp_path: Path, state: dict[str, Any], *steps: int, **options: Any) -> None:
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", **options)) as ckpt:
        for step in steps:
            ckpt.save(step, state).wait("local", timeout=HANG_SECONDS)


def test_outside_of_a_pod_a_folder_is_required() -> None:
    with pytest.raises(ConfigError, match=r'Checkpointer\(dir="ckpt"\)'):
        holdfast.Checkpointer()


@contextlib.contextmanager
def executed_persisters() -> Iterator[None]:
    """Let the SDK execute its persisters, as it does for users, and not fork them from the zygote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "subprocess", subprocess)
        yield


def test_the_persister_starts_by_an_exec(tmp_path: Path) -> None:
    state = {"t": torch.zeros(2)}
    with executed_persisters():
        with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
            ckpt.save(1, {"t": torch.ones(2)}).wait("local", timeout=HANG_SECONDS)
        with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
            assert ckpt.restore(state) == 1
    assert state["t"].tolist() == [1.0, 1.0]


def test_a_fresh_folder_has_nothing_to_restore(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore({"x": torch.zeros(1)}) is None


def test_saved_bytes_are_those_of_the_step(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    expected = tensor.clone()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        handle = ckpt.save(1, {"t": tensor})
        tensor.fill_(-1)
        handle.wait("local", timeout=HANG_SECONDS)
        handle.wait("replicated", timeout=HANG_SECONDS)
        with pytest.raises(SaveFailedError, match=r"no object store; set .*store="):
            handle.wait("persisted", timeout=HANG_SECONDS)
        assert handle.failure is None, "a level that does not exist here has not failed"
    back = {"t": torch.zeros(1 << 20)}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(back) == 1
    assert torch.equal(back["t"], expected)


def test_close_removes_the_slots(tmp_path: Path, memory: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"t": torch.ones(4)}).wait("local", timeout=HANG_SECONDS)
        assert list(memory.rglob("*.slot"))
    assert list(memory.iterdir()) == []


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, {"t": torch.ones(4)}, 1, 2, 3, 4, 5, keep_last=2)
    kept = sorted(p.parent.name for p in (tmp_path / "ckpt").rglob("manifests/*/*.json"))
    assert kept == ["s000000000004", "s000000000005"]
    shards = sorted(p.parent.name.partition("-")[0] for p in (tmp_path / "ckpt").rglob("*.shard"))
    assert shards == kept


def test_steps_saves_by_interval_and_at_the_end(tmp_path: Path) -> None:
    state = {"t": torch.zeros(1)}
    options: dict[str, Any] = {"interval_steps": 3, "when_busy": "wait"}
    folder = holdfast.Folder(tmp_path / "ckpt", keep_last=10)
    with holdfast.Checkpointer(folder, **options) as ckpt:
        assert list(ckpt.steps(7, state)) == list(range(7))
    with holdfast.Checkpointer(folder, **options) as ckpt:
        assert list(ckpt.steps(7, state)) == []
        assert list(ckpt.steps(9, state)) == [7, 8]


def test_a_bad_copy_is_skipped_and_quarantined(tmp_path: Path) -> None:
    state = {"t": torch.ones(1 << 12)}
    saved(tmp_path, state, 1)
    state["t"].fill_(2)
    saved(tmp_path, state, 2)
    (shard,) = (tmp_path / "ckpt").rglob("s000000000002-*/*.shard")
    with open(shard, "r+b") as file:
        file.seek(9000)
        file.write(b"\x55")
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
        assert state["t"][0] == 1
    assert list((tmp_path / "ckpt/tier/quarantine").iterdir())


def test_a_folder_without_a_readable_checkpoint_is_not_a_fresh_start(tmp_path: Path) -> None:
    saved(tmp_path, {"t": torch.ones(1)}, 1)
    for shard in (tmp_path / "ckpt").rglob("*.shard"):
        shard.unlink()
    with (
        pytest.raises(CorruptionError, match="none that can be restored"),
        holdfast.Checkpointer(dir=tmp_path / "ckpt"),
    ):
        pytest.fail("it opened")


@pytest.mark.fault("The folder cannot be opened, and the script uses the Checkpointer again")
def test_a_checkpointer_that_could_not_open_is_closed(tmp_path: Path, memory: Path) -> None:
    """On another rank than 0 it has no connection, and its next call would wait for one for ever."""
    saved(tmp_path, {"t": torch.ones(1)}, 1)
    for shard in (tmp_path / "ckpt").rglob("*.shard"):
        shard.unlink()
    ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt")
    with pytest.raises(CorruptionError, match="none that can be restored"):
        ckpt.restore({"t": torch.ones(1)})
    until(lambda: persisters_of(os.getpid(), tmp_path) == [], "the persister has ended")
    with holdfast.Checkpointer(dir=tmp_path / "other"):
        pass  # it removes what the persister still read when the first one was closed
    assert list(memory.iterdir()) == []
    with pytest.raises(ConfigError, match="it was closed"):
        ckpt.restore({"t": torch.ones(1)})


def test_a_mismatch_is_an_error_only_in_a_strict_restore(tmp_path: Path) -> None:
    saved(tmp_path, {"t": torch.ones(2)}, 1)
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt,
        pytest.raises(StateMismatchError, match=r"t: expected float32 \[3\]"),
    ):
        ckpt.restore({"t": torch.ones(3)})
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", strict=False) as ckpt:
        assert ckpt.restore({"t": torch.ones(3)}) == 1
        assert len(ckpt.skipped) == 1


def test_a_failed_save_is_a_warning_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        handle = ckpt.save(1, {"bad": object()})
        assert (
            ckpt.saves_failed >= 1
        )  # step 4 counts, too, if its report was lost with the connection
        assert "training continues" in caplog.text
        with pytest.raises(SaveFailedError, match="bad"):
            handle.wait(timeout=0)
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt", on_save_error="raise") as ckpt,
        pytest.raises(UnsupportedStateError, match=r"bad: builtins\.object"),
    ):
        ckpt.save(1, {"bad": object()})


def test_a_state_that_grows_gets_larger_slots(tmp_path: Path) -> None:
    state: dict[str, Any] = {"t": torch.ones(4)}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.allocate(state)
        state["more"] = torch.ones(1 << 20)
        ckpt.save(1, state).wait(timeout=HANG_SECONDS)


def test_a_killed_persister_is_started_again(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
        for pid in persisters_of(os.getpid(), tmp_path):
            os.kill(pid, signal.SIGKILL)
        state = {"t": torch.full((4,), 2.0)}
        until(lambda: ckpt.save(2, state).failure is None, "a save after the restart")
        until(lambda: committed_step(tmp_path / "ckpt") == 2, "step 2")


@pytest.mark.fault(
    "The process that writes a folder is being started again when the last step is saved"
)
def test_the_last_save_waits_for_a_persister_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    state = {"t": np.zeros(4)}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=2) as ckpt:
        for index in ckpt.steps(6, state):
            state["t"] += 1
            if index == 5:
                monkeypatch.setattr(sys, "executable", str(slow))
                for pid in persisters_of(os.getpid(), tmp_path):
                    os.kill(pid, signal.SIGKILL)
                    until(lambda pid=pid: not is_alive(pid), "its end")
    assert (ckpt.saves_failed, committed_step(tmp_path / "ckpt")) == (0, 6)


@pytest.mark.fault(
    "The process that writes a folder is being started again when the last step is saved"
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_last_save_without_a_persister_is_counted_and_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    raises: bool,
) -> None:
    monkeypatch.setattr(folder, "_STARTING_SECONDS", 0.0)
    state = {"t": np.zeros(4)}
    with (
        pytest.raises(UnavailableError, match="exit status 1")
        if raises
        else contextlib.nullcontext(),
        holdfast.Checkpointer(
            dir=tmp_path / "ckpt", interval_steps=2, on_save_error="raise" if raises else "warn"
        ) as ckpt,
    ):
        for index in ckpt.steps(6, state):
            state["t"] += 1
            if index == 5:
                until(lambda: committed_step(tmp_path / "ckpt") == 4, "step 4: its slot is free")
                monkeypatch.setattr(sys, "executable", "/bin/false")
                for pid in persisters_of(os.getpid(), tmp_path):
                    os.kill(pid, signal.SIGKILL)
                until(lambda: "no connection to" in caplog.text, "the end of the connection")
    assert ckpt.saves_failed >= 1  # step 4 counts, too, if its report was lost with the connection
    assert raises or "save of step 6 failed" in caplog.text


def test_saves_continue_after_a_save_that_gave_up_waiting_for_a_persister(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_STARTING_SECONDS", 0.0)
    state, executable = {"t": torch.ones(4)}, sys.executable
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as ckpt:
        ckpt.save(1, state).wait("local", timeout=HANG_SECONDS)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        for pid in persisters_of(os.getpid(), tmp_path):
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not is_alive(pid), "its end")
        until(lambda: ckpt.save(2, state, is_last=True).failure is not None, "a save that gave up")
        monkeypatch.setattr(sys, "executable", executable)

        def saved() -> bool:
            """A handle has no failure yet while the next persister still starts."""
            try:
                ckpt.save(3, state).wait("local", timeout=HANG_SECONDS)
            except SaveFailedError:
                return False
            return True

        until(saved, "a save after that")
    assert committed_step(tmp_path / "ckpt") == 3


@pytest.mark.fault(
    "The process that writes a folder ends while the last save waits for a free slot, and cannot start"
)
def test_a_save_that_waits_for_a_slot_ends_when_no_persister_can_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_STARTING_SECONDS", 0.0)
    state, waits, acquire = {"t": torch.ones(4)}, threading.Event(), SlotRing.acquire
    directory = holdfast.Folder(tmp_path / "ckpt", slots=2)

    def acquired(ring: SlotRing, *arguments: Any) -> Slot | None:
        waits.set()
        return acquire(ring, *arguments)

    def end_persister() -> None:
        assert waits.wait(HANG_SECONDS)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        for pid in persisters_of(os.getpid(), tmp_path):
            os.kill(pid, signal.SIGKILL)

    with holdfast.Checkpointer(directory, interval_steps=0) as ckpt, ThreadPoolExecutor(1) as other:
        ckpt.save(1, state).wait("local", timeout=HANG_SECONDS)
        for pid in persisters_of(os.getpid(), tmp_path):
            stop(pid)
        for step in (2, 3):  # each takes a slot, which the stopped persister does not free
            assert ckpt.save(step, state).failure is None
        monkeypatch.setattr(SlotRing, "acquire", acquired)
        ended = other.submit(end_persister)
        began = time.monotonic()
        failure = ckpt.save(4, state, is_last=True).failure
        assert time.monotonic() - began < HANG_SECONDS
        ended.result()
    assert "has not replied" in (failure or ""), failure


@pytest.mark.fault(
    "A folder cannot be opened for a moment while the last save waits for a free slot"
)
def test_a_save_that_waits_for_a_slot_outlasts_a_folder_that_is_away_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, waits, acquire = {"t": torch.ones(4)}, threading.Event(), SlotRing.acquire
    root = tmp_path / "ckpt"

    def acquired(ring: SlotRing, *arguments: Any) -> Slot | None:
        waits.set()
        return acquire(ring, *arguments)

    def take_away() -> None:
        assert waits.wait(HANG_SECONDS)
        (root / "tier").rename(root / "away")
        (root / "tier").write_text("no directory")
        for pid in persisters_of(os.getpid(), tmp_path):
            os.kill(pid, signal.SIGKILL)
        until(lambda: "cannot serve this rank" in caplog.text, "a persister that refuses")
        time.sleep(0.5)  # the save looks at its slots some times
        # In one step: a persister that found nothing at all would create the directory.
        (root / "back").symlink_to("away", target_is_directory=True)
        (root / "back").replace(root / "tier")

    place = holdfast.Folder(root, slots=2)
    with holdfast.Checkpointer(place, interval_steps=0) as ckpt, ThreadPoolExecutor(1) as other:
        ckpt.save(1, state).wait("local", timeout=HANG_SECONDS)
        for pid in persisters_of(os.getpid(), tmp_path):
            stop(pid)
        for step in (2, 3):
            assert ckpt.save(step, state).failure is None
        monkeypatch.setattr(SlotRing, "acquire", acquired)
        returned = other.submit(take_away)
        last = ckpt.save(4, state, is_last=True)
        returned.result()
        last.wait("local", timeout=HANG_SECONDS)
    assert committed_step(root) == 4


def test_a_persister_that_cannot_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_STARTING_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(UnavailableError, match=r"has not replied, .* \d+ times .* exit status 1;"),
        holdfast.Checkpointer(dir=tmp_path / "ckpt"),
    ):
        pass


def test_a_persister_that_cannot_be_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_STARTING_SECONDS", 0.0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with (
        pytest.raises(UnavailableError, match=r"times in a row: cannot connect: .*absent"),
        holdfast.Checkpointer(dir=tmp_path / "ckpt"),
    ):
        pass


def test_a_slow_persister_is_waited_for_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "_LOG_AFTER_SECONDS", 0.3)
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
    said = [
        r.message
        for r in caplog.records
        if "still waiting for a reply of the process that writes" in r.message
    ]
    assert len(said) == 1


SAVE_AND_END = """
import os, signal, sys, holdfast, numpy as np
folder, go, how = sys.argv[1:]
with holdfast.Checkpointer(dir=folder) as ckpt:
    ckpt.save(1, {"t": np.full(1 << 18, 1.0)}).wait("local")
    os.unlink(go)  # from now on its persister's disk hangs
    for step in (2, 3):
        assert ckpt.save(step, {"t": np.full(1 << 18, float(step))}).failure is None
    assert ckpt._session.wait_acknowledged(540)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("failed")
"""


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_start_waits_for_the_saves_of_an_ended_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Neither of the ended run's last two saves is on the disk when the next run starts."""
    program, folder, go = tmp_path / "program.py", tmp_path / "ckpt", tmp_path / "go"
    program.write_text(SAVE_AND_END)
    go.touch()
    ended = zygote.run(
        [sys.executable, str(program), str(folder), str(go), how],
        env={**os.environ, **in_every_python(tmp_path, f"node.write=wait:{go}")},
        check=False,
    )
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 1)
    assert committed_step(folder) == 1

    def go_on() -> None:
        until(lambda: "waiting for process" in caplog.text, "the next run waits")
        go.touch()

    state = {"t": np.zeros(1 << 18)}
    with ThreadPoolExecutor(1) as other:
        going_on = other.submit(go_on)
        with holdfast.Checkpointer(dir=folder) as ckpt:
            assert ckpt.restore(state) == 3
        going_on.result()
    assert (state["t"] == 3.0).all()
    assert not (folder / "processes").exists()


def test_a_reader_and_a_training_do_not_see_each_others_slots(tmp_path: Path, memory: Path) -> None:
    """A reader and a training, both rank 0. Neither sees the steps in the slots of the other."""
    state, seen = {"t": torch.full((1 << 12,), 1.0)}, {"t": torch.zeros(1 << 12)}
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", keep_last=5)) as training:
        training.save(1, state).wait("local", timeout=HANG_SECONDS)
        with holdfast.Checkpointer(dir=tmp_path / "ckpt") as looking:
            assert looking.restore(seen) == 1
            assert len(list(memory.glob("*+*"))) == 1
            state["t"].fill_(2.0)
            training.save(2, state).wait("local", timeout=HANG_SECONDS)
            assert (seen["t"] == 1.0).all()
        state["t"].fill_(3.0)
        training.save(3, state).wait("local", timeout=HANG_SECONDS)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as looking:
        assert looking.restore(seen) == 3
    assert (seen["t"] == 3.0).all()
    assert list(memory.iterdir()) == []


def test_slots_of_a_killed_process_are_found_beside_a_live_one(
    tmp_path: Path, memory: Path
) -> None:
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt"),
        holdfast.Checkpointer(dir=tmp_path / "ckpt"),
    ):
        (lives,) = memory.glob("*+*")
        killed = lives.with_name(f"{lives.name.partition('+')[0]}+killed")
        (killed / "slots").mkdir(parents=True)
        with holdfast.Checkpointer(dir=tmp_path / "ckpt"):
            assert lives.exists() and not killed.exists()
    assert list(memory.iterdir()) == []


def test_an_unreferenced_checkpointer_releases_everything(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell of a notebook that runs again drops its first Checkpointer."""
    monkeypatch.setattr("holdfast.checkpointer._RELEASE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(folder, "_LEAVE_AFTER_ERROR_SECONDS", HANG_SECONDS)
    state = {"t": torch.zeros(1 << 12)}
    ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt")
    for step in (1, 2):
        state["t"].fill_(step)
        ckpt.save(step, state)
        ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt")
        assert ckpt.restore(state) == step
        assert len(list(memory.iterdir())) == 1
    del ckpt
    assert list(memory.iterdir()) == []
    assert not any(map(is_alive, persisters_of(os.getpid(), tmp_path)))
    assert not (tmp_path / "ckpt/processes").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_closed_checkpointer_refuses_a_save(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"t": torch.ones(4)})
    with pytest.raises(ConfigError, match="it was closed"):
        ckpt.save(2, {"t": torch.ones(4)})


def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    state = {"t": torch.zeros(1)}
    done = []
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as ckpt:
        for index in ckpt.steps(10, state):
            done.append(index)
            if index == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.stopping
    assert done == [0, 1, 2, 3]
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=0) as ckpt:
        assert ckpt.restore(state) == 4


def test_the_module_level_functions_save_and_restore(tmp_path: Path) -> None:
    program = (
        "import sys, torch, holdfast\n"
        "state = {'t': torch.zeros(2)}\n"
        "print(holdfast.restore(state, dir=sys.argv[1]), state['t'][0].item())\n"
        "state['t'] += 1\n"
        "holdfast.save(5, state)\n"
    )
    outputs = [
        zygote.run(
            [sys.executable, "-c", program, str(tmp_path / "ckpt")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs == [["None", "0.0"], ["5", "1.0"]]


@pytest.mark.integration
@pytest.mark.parametrize("whom", ["trainer", "persister", "both"])
def test_a_kill_at_any_moment_loses_no_committed_step(tmp_path: Path, whom: str) -> None:
    """No committed step is lost, and each start restores the exact state of its step (PROGRAM asserts it).

    A start may restore a step that was not committed at the kill: it finishes a commit that lacks only the
    manifest.
    """
    program, folder = tmp_path / "program.py", tmp_path / "ckpt"
    program.write_text(PROGRAM)
    chance = random.Random(whom)
    promised = 0

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(program), str(folder), "1000000"]
        return zygote.Popen(command, stdout=subprocess.PIPE, start_new_session=True)

    for _ in range(4):
        victim = start()
        assert victim.stdout is not None
        with victim.stdout as output:
            assert int(output.readline()) > promised
            for _ in range(chance.randrange(3, 40)):
                output.readline()
            while committed_step(folder) <= promised:
                output.readline()
            persisters = children_of(victim.pid)
            if whom != "trainer":
                for pid in persisters:
                    os.kill(pid, signal.SIGKILL)
            if whom == "persister":
                for _ in range(20):
                    output.readline()
                persisters += children_of(victim.pid)
            promised = committed_step(folder)
            victim.kill()
        victim.wait()
        until(lambda pids=persisters: not any(map(is_alive, pids)), "no orphans")  # type: ignore[misc]
    last = start()
    assert int(last.stdout.readline()) > promised
    last.terminate()
    last.communicate(timeout=HANG_SECONDS)
    assert last.returncode == 0


@pytest.mark.fault("A state has a tensor of one element with another stride")
def test_a_tensor_of_one_element_with_any_stride_is_saved_and_restored(tmp_path: Path) -> None:
    """torch says that such a tensor is contiguous, but does not show its bytes in a view."""

    def state(value: float) -> dict[str, torch.Tensor]:
        wide = torch.full((4, 3), value, dtype=torch.complex128)
        return {"slice": torch.full((4,), value)[::4], "wide": wide[::4, ::3]}

    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(2.0)).wait(timeout=HANG_SECONDS)
    restored = state(0.0)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(restored) == 1
    assert {name: tensor.item() for name, tensor in restored.items()} == {"slice": 2, "wide": 2}


def test_a_checkpointer_without_slots_is_refused(tmp_path: Path) -> None:
    """The error names what to use instead."""
    with pytest.raises(ConfigError, match=r"slots=0\).*at least 1.*slots=1 keeps one copy"):
        holdfast.Checkpointer(holdfast.Folder(tmp_path, slots=0))


def test_a_state_without_room_is_refused_before_the_first_step(
    tmp_path: Path, memory: Path
) -> None:
    """The error names the bytes, and the settings that help."""
    with (
        holdfast.Checkpointer(dir=tmp_path) as ckpt,
        pytest.raises(CapacityError, match=r"needs \d+ more bytes for 2 slots.*slots=1"),
    ):
        ckpt.allocate({"t": np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 44,), (0,))})
