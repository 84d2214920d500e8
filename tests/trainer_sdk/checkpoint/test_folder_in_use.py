"""Only one run trains in a folder at a time. Others can restore from it, even without write permission."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import zygote
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import delete_at_once
from tests.support.trainer.dict_store import DictStore
from tests.support.trainer.launched import committed_step, until

import holdfast
from holdfast.base.options import Options
from holdfast.base.settings import RankSettings
from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast.places.folder import FolderPlace
from holdfast_core.errors import ConfigError, SaveFailedError, UnavailableError
from holdfast_core.ids import Rank

TRAIN = """
import sys, time, numpy as np, holdfast
with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    ckpt.save(1, {"t": np.ones(4)}).wait("local")
    print("saved", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.directory.processes._ENDING_SECONDS", 0.2)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"t": torch.full((4,), value, dtype=torch.float64)}


def training(folder: Path) -> subprocess.Popen[str]:
    process = zygote.Popen(
        [sys.executable, "-c", TRAIN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    return process


@pytest.mark.fault("A second training saves into the same folder")
def test_a_second_training_is_warned_at_opening_and_refused_at_its_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = training(tmp_path / "ckpt")
    whose = rf"process {first.pid} on \S+ trains in it"
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as second:
        (said,) = [r.message for r in caplog.records if "is in use" in r.message]
        assert f"process {first.pid} on " in said
        found = state()
        assert second.restore(found) == 1
        assert found["t"][0] == 1
        for attempt in (
            lambda: second.save(2, found),
            lambda: second.allocate(found),
            lambda: next(second.steps(5, found)),
        ):
            with pytest.raises(ConfigError, match=whose):
                attempt()
        assert second.saves_failed == 0
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second.save(2, found).wait(timeout=HANG_SECONDS)
    assert committed_step(tmp_path / "ckpt") == 2


def test_a_folder_can_be_used_again_after_its_training_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
            ckpt.save(step, state()).wait(timeout=HANG_SECONDS)
    assert "in use" not in caplog.text
    assert not (tmp_path / "ckpt/training.lock").exists()


@pytest.mark.fault("A run saves into a folder that another one has saved into since it opened")
def test_a_second_training_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as first,
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as second,
    ):
        first.save(1, state()).wait(timeout=HANG_SECONDS)
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* one run at a time"):
            second.save(2, state())
        first.close()
        with pytest.raises(ConfigError, match="has saved step 1 since this one opened"):
            second.save(2, state())
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as third:
        assert third.restore(state()) == 1
        third.save(2, state()).wait(timeout=HANG_SECONDS)


@pytest.mark.fault("A preempted run commits its last step while its successor opens the folder")
def test_a_save_between_the_choice_and_the_end_of_opening_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted run commits its last step while its successor opens the folder."""
    folder, go = tmp_path / "ckpt", tmp_path / "go"
    first = holdfast.Checkpointer(dir=folder)
    first.save(1, state(1)).wait(timeout=HANG_SECONDS)
    rules = in_every_python(tmp_path, f"persister.started=wait:{go}")
    for name, value in rules.items():
        monkeypatch.setenv(name, value)
    second = holdfast.Checkpointer(dir=folder)
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(second.open)
        # The second run claims its writer after it has chosen step 1.
        until(lambda: len(list(folder.glob("processes/*.writer"))) == 2, "it has chosen")
        first.save(2, state(2)).wait(timeout=HANG_SECONDS)
        first.close()
        go.touch()
        opening.result(timeout=HANG_SECONDS)
    found = state()
    assert second.restore(found) == 1
    with pytest.raises(ConfigError, match="has saved step 2 since this one opened"):
        second.save(2, found)
    second.close()
    with holdfast.Checkpointer(dir=folder) as third:
        assert third.restore(found) == 2
        assert found["t"][0] == 2
        third.save(3, found).wait(timeout=HANG_SECONDS)


def place(folder: Path, store: GangStore | None = None, rank: int = 0) -> FolderPlace:
    """Return an open place of one rank in a folder."""
    options = Options(
        folder=holdfast.Folder(folder),
        interval_steps=1,
        strict=True,
        on_save_error="warn",
        when_busy="skip",
    )
    found = FolderPlace(
        holdfast.Folder(folder),
        options,
        RankSettings(rank=Rank(rank), world_size=2, local_world_size=2),
    )
    found.open(store)
    return found


@pytest.mark.fault("A second gang saves into the same folder")
def test_every_rank_of_the_second_gang_gets_the_same_error(tmp_path: Path) -> None:
    first, second = GangStore(DictStore()), GangStore(DictStore())
    places = [place(tmp_path / "ckpt", store, rank) for store in (first, second) for rank in (0, 1)]
    for owner in places[:2]:
        owner.take_for_training()
    errors = []
    for other in places[2:]:
        with pytest.raises(ConfigError, match="is in use") as error:
            other.take_for_training()
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    for one in places:
        one.close(wait=False)


def saves_again(ckpt: holdfast.Checkpointer) -> None:
    for step in range(2, 50):
        with contextlib.suppress(SaveFailedError):
            ckpt.save(step, state()).wait(timeout=HANG_SECONDS)
            return
    raise AssertionError("no save into the folder became durable")


@pytest.mark.fault(
    "A folder is deleted under way, and a second training starts after the next save"
)
@pytest.mark.parametrize("what", ["", "training.lock"], ids=["the folder", "its lock alone"])
def test_a_training_locks_its_folder_again_after_a_deletion(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as first:
        first.save(1, state()).wait(timeout=HANG_SECONDS)
        if what:
            (folder / what).unlink()
        else:
            delete_at_once(folder)
        saves_again(first)
        with (
            holdfast.Checkpointer(dir=folder) as second,
            pytest.raises(ConfigError, match=rf"process {os.getpid()} on \S+ trains in it"),
        ):
            second.save(60, state())


@pytest.mark.fault("A second training takes a folder that was deleted under way")
def test_a_training_does_not_save_into_a_folder_that_another_training_uses(tmp_path: Path) -> None:
    """The folder was deleted, and the other training started before the first one saved again."""
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as first:
        first.save(1, state()).wait(timeout=HANG_SECONDS)
        delete_at_once(folder)
        second = training(folder)
        with pytest.raises(SaveFailedError, match=rf"process {second.pid} on \S+ trains in it"):
            first.save(2, state()).wait(timeout=HANG_SECONDS)
        assert first.saves_failed == 1
    assert committed_step(folder) == 1, "the other training's"
    with (
        holdfast.Checkpointer(dir=folder) as third,
        pytest.raises(ConfigError, match=rf"process {second.pid} on \S+ trains in it"),
    ):
        third.save(2, state())
    second.communicate()


@pytest.mark.fault("A writer is started in a folder that another run has taken")
def test_no_persister_starts_in_a_folder_that_another_run_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a writer would write the saves that were handed over before the folder was deleted."""
    first, second = place(tmp_path / "ckpt"), place(tmp_path / "ckpt")
    first.take_for_training()
    shutil.rmtree(tmp_path / "ckpt")
    second.take_for_training()
    monkeypatch.setattr("holdfast.places.folder._STARTING_SECONDS", 0.0)
    with pytest.raises(UnavailableError, match=r"cannot connect: .* is in use"):
        first.start(Session(first.traits.job_uid, Rank(0), None, first.traits.peer))
    first.close(wait=False)
    with pytest.raises(ConfigError, match="is in use"):
        place(tmp_path / "ckpt").take_for_training()
    second.close(wait=False)


READ = """
import sys, numpy as np, holdfast
found = {"t": np.zeros(4)}
with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    print(ckpt.restore(found), found["t"][0], flush=True)
    try:
        ckpt.save(9, found)
    except holdfast.HoldfastError as error:
        print(error)
"""


def without_rights(*command: str) -> list[str]:
    """Return the command so that it runs without the superuser's right to write everywhere."""
    if os.geteuid() != 0:
        return list(command)
    dropped = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}", *command]


@pytest.mark.fault("A folder cannot be written")
def test_a_folder_that_cannot_be_written_can_be_restored_from(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, state(1)).wait(timeout=HANG_SECONDS)
    before = sorted(folder.rglob("*"))
    directories = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    for directory in directories:
        directory.chmod(0o500)
    try:
        done = subprocess.run(
            without_rights(sys.executable, "-c", READ, str(folder)),
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_SECONDS,
        )
    finally:
        for directory in directories:
            directory.chmod(0o700)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "1 1.0"
    assert f"{folder} cannot be written" in lines[1]
    assert sorted(folder.rglob("*")) == before
