"""A store that is away or refuses: before the first step, and while a run needs it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.ports import closed_port
from tests.support.trainer.counted import Training
from tests.support.trainer.launched import children_of, is_alive, persisters_of, until

import holdfast
from holdfast_core.errors import SaveFailedError

PROGRAM = """
import sys
from pathlib import Path
from tests.support.trainer.counted import Training
import holdfast
training = Training()
with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], store=sys.argv[2])) as ckpt:
    print("restored", ckpt.restore(training.state), training.done, flush=True)
"""


def saved(folder: Path, url: str, step: int) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        ckpt.restore(training.state)
        while training.done < step:
            training.step()
        ckpt.save(step, training.state).wait("persisted", timeout=HANG_SECONDS)


def damage_newest(folder: Path) -> None:
    (path,) = folder.rglob("s000000000002-*/*.shard")
    os.truncate(path, 4096)


@pytest.mark.fault("The store is away and the folder is empty, or its newest step is damaged")
@pytest.mark.parametrize("lose", [shutil.rmtree, damage_newest])
def test_a_run_whose_folder_lacks_the_newest_step_waits_for_the_store_and_says_so(
    folder: Path, url: str, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    """It must never start from the beginning, or go back, because the store did not answer."""
    with MinioServer() as server:
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://{server.endpoint}"}
        command = [sys.executable, "-c", PROGRAM, str(folder), url]
        zygote.run(
            [sys.executable, "-c", SAVE, str(folder), url],
            env=environment,
            check=True,
            timeout=HANG_SECONDS,
        )
        lose(folder)
        server.kill()
        log = tmp_path / "log"
        with log.open("wb") as out:
            process = zygote.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            until(lambda: "waiting for s3://" in log.read_text(), "the run says that it waits")
            assert "must not start from the beginning" in log.read_text()
            assert process.poll() is None
            server.revive()
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
        assert "restored 2 2" in log.read_text()


SAVE = """
import sys
from tests.support.trainer.counted import Training
import holdfast
training = Training()
with holdfast.Checkpointer(holdfast.Folder(sys.argv[1], store=sys.argv[2])) as ckpt:
    for step in (1, 2):
        training.step()
        ckpt.save(step, training.state).wait("persisted")
"""


@pytest.mark.fault("The trainer is killed while it waits for the store")
def test_the_persister_ends_if_its_trainer_is_killed_while_it_waits(
    folder: Path, url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with closed_port() as port, log.open("wb") as out:
        process = zygote.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), url],
            env={**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"},
            stdout=out,
            stderr=out,
        )
        try:
            until(lambda: "waiting for s3://" in log.read_text(), "the run says that it waits")
            persisters = children_of(process.pid)
            assert persisters
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        until(lambda: not any(map(is_alive, persisters)), "the persister has ended")
    assert "restored" not in log.read_text()


@pytest.mark.fault("The store is away at the start")
def test_a_run_whose_folder_has_a_checkpoint_starts_without_the_store(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(folder, url, 1)
    with MinioServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.endpoint}")
        server.kill()
        training = Training()
        with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
            assert ckpt.restore(training.state) == 1
            training.step()
            handle = ckpt.save(2, training.state)
            handle.wait("local", timeout=HANG_SECONDS)
            assert handle.level != "persisted"
            server.revive()
            handle.wait("persisted", timeout=HANG_SECONDS)
    assert capfd.readouterr().err.count("this run starts from step 1") == 1


@pytest.mark.fault("A script rolls back or closes before an upload was reported")
def test_waits_end_for_uploads_that_are_not_reported_any_more(
    folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(folder, url, 1)
    with MinioServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.endpoint}")
        server.kill()
        training = Training()
        ckpt = holdfast.Checkpointer(holdfast.Folder(folder, store=url))
        ckpt.restore(training.state)
        training.step()
        before = ckpt.save(2, training.state)
        before.wait("local", timeout=HANG_SECONDS)
        assert ckpt.restore(training.state, step=1) == 1
        with pytest.raises(SaveFailedError, match="a restore began another round"):
            before.wait("persisted", timeout=HANG_SECONDS)
        training.step()
        last = ckpt.save(2, training.state)
        last.wait("local", timeout=HANG_SECONDS)
        persisters = persisters_of(os.getpid(), folder)
        assert persisters
        ckpt.close(wait=False)
        with pytest.raises(SaveFailedError, match="was closed"):
            last.wait("persisted", timeout=HANG_SECONDS)
        assert last.failure is None  # the persister continues with the upload
        server.revive()
        until(lambda: not any(map(is_alive, persisters)), "the persister has ended")
