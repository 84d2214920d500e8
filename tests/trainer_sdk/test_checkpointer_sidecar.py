"""The Checkpointer in a pod, with a sidecar that refuses, is slow, dies and returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.connection.link import Link
from holdfast_core.errors import SaveFailedError, UnavailableError
from holdfast_core.messages.schema import Fill, Hello, Progress, Refusal, Stage
from holdfast_core.pacing import ForegroundCopyGate


def enter_round(sidecar: WatchedSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a rank's environment as a restart of the gang does."""
    sidecar.stop()
    sidecar.start()
    monkeypatch.setenv("HOLDFAST_ROUND", str(sidecar.round))


def train(ckpt: holdfast.Checkpointer, state: dict[str, Any], steps: int) -> list[int]:
    done = []
    for index in ckpt.steps(steps, state):
        state["t"] += 1
        ckpt.report(loss=torch.tensor(0.5), bad=float("nan"))
        done.append(index)
    return done


def test_training_continues_in_the_next_round(
    sidecar: WatchedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.zeros(3)}
    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        assert train(ckpt, state, 5) == [0, 1, 2, 3, 4]
    assert [m.step for m in sidecar.messages(Stage)] == [2, 4, 5]
    assert sidecar.messages(Hello)[0].round == 0

    enter_round(sidecar, monkeypatch)
    state = {"t": torch.zeros(3)}
    with holdfast.Checkpointer() as ckpt:
        assert train(ckpt, state, 8) == [5, 6, 7]
    assert state["t"].tolist() == [8.0] * 3


def test_a_persister_pauses_while_a_rank_copies(
    sidecar: WatchedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake sidecar writes with the code of a folder's persister."""
    asked: list[Path] = []

    def ask(way: ForegroundCopyGate) -> float:
        asked.append(way._slots_dir)
        return 0.0

    monkeypatch.setattr(ForegroundCopyGate, "wait_for_copies", ask)
    with holdfast.Checkpointer() as ckpt:
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
    assert set(asked) == {tmp_path / "shared/slots"}


@pytest.mark.fault("The structure of a state changes at each save, for days")
def test_layouts_of_saves_that_have_ended_are_removed(
    sidecar: WatchedSidecar, tmp_path: Path
) -> None:
    """They are in the memory that the slots need."""
    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        for step in range(1, 9):
            ckpt.save(step, {"replayed": torch.ones(step)}).wait(timeout=HANG_SECONDS)
    slots = 2
    assert len(list((tmp_path / "shared/layouts").iterdir())) == slots


class OwnLoading(torch.nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


def test_a_sidecar_only_fills_memory_that_the_rank_has_touched(
    sidecar: WatchedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages would be charged to the sidecar, whose memory limit does not grow with the state."""
    state = {"t": torch.zeros(1 << 20), "own": OwnLoading(1, 1)}  # not loaded in place
    with holdfast.Checkpointer() as ckpt:
        train(ckpt, state, 2)
    enter_round(sidecar, monkeypatch)
    slots = tmp_path / "shared" / "slots"
    for path in slots.glob("*.slot"):
        path.unlink()
    seen = []
    request = Link.request

    def observed(link: Link, message: object, timeout_seconds: float) -> object:
        if isinstance(message, Fill):
            seen.extend(path.stat() for path in slots.glob("*.slot"))
        return request(link, message, timeout_seconds)

    monkeypatch.setattr(Link, "request", observed)
    with holdfast.Checkpointer() as ckpt:
        assert ckpt.restore(state) == 2
    assert len(seen) == 2
    assert all(found.st_blocks * 512 >= found.st_size > 1 << 20 for found in seen)


def test_progress_has_the_step_and_the_metrics(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        train(ckpt, {"t": torch.zeros(1)}, 3)
        until(lambda: [m.step for m in sidecar.messages(Progress)][-1:] == [3], "the last step")
    last = sidecar.messages(Progress)[-1]
    assert (last.step, last.rank, last.round) == (3, 0, 0)
    assert last.metrics == {"loss": 0.5}
    assert sidecar.messages(Progress)[-1].blocked_seconds > 0


def test_requests_to_save_and_to_stop_are_followed(sidecar: WatchedSidecar) -> None:
    state = {"t": torch.zeros(1)}
    with holdfast.Checkpointer() as ckpt:
        done = []
        for index in ckpt.steps(100, state):
            done.append(index)
            if index == 4:
                sidecar.request_save()
                until(lambda: ckpt._session.requests._save_from is not None, "the push")
            if index == 6:
                sidecar.request_stop()
                until(lambda: ckpt._session.requests.stop, "the push")
        assert ckpt.stopping
    assert done[-1] == 6
    assert {5, 7} <= {m.step for m in sidecar.messages(Stage)}


def test_a_refused_stage_frees_its_slot(sidecar: WatchedSidecar) -> None:
    sidecar.faults.refuse["Stage"] = Refusal.SEALED
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        for step in range(1, 5):  # more saves than slots
            with pytest.raises(SaveFailedError, match="Sealed"):
                ckpt.save(step, state).wait(timeout=HANG_SECONDS)
        sidecar.faults.refuse.clear()
        ckpt.save(9, state).wait(timeout=HANG_SECONDS)


@pytest.mark.fault("The disk is a hundred times slower than a step")
def test_both_slots_busy_skips_and_counts(sidecar: WatchedSidecar) -> None:
    sidecar.faults.delay_seconds["Stage"] = 3600
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        handles = [ckpt.save(step, state) for step in (1, 2, 3)]
        assert ckpt.saves_skipped == 1
        assert "skipped" in handles[2].failure
        ckpt.close(wait=False)  # no process will empty the slots


def test_the_last_save_waits_for_a_slot(sidecar: WatchedSidecar) -> None:
    sidecar.faults.delay_seconds["Stage"] = 1
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        for step in (1, 2):
            ckpt.save(step, state)
        ckpt.save(3, state, is_last=True).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_skipped == 0


@pytest.mark.fault("A stop is requested while all slots are busy, in a loop without steps")
def test_the_save_of_a_stop_waits_for_a_slot(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        sidecar.request_stop()
        until(lambda: ckpt._session.requests.stop, "the push")
        step = 1
        while not ckpt.stopping:
            step += 1
            ckpt.should_save(step)
        sidecar.faults.delay_seconds["Stage"] = 1
        for earlier in (step - 1, step - 2):
            ckpt.save(earlier, state)  # both slots are busy now
        ckpt.save(step, state).wait(timeout=HANG_SECONDS)


def test_training_continues_without_a_sidecar(
    sidecar: WatchedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"t": torch.zeros(1)}
    with holdfast.Checkpointer() as ckpt:
        steps = ckpt.steps(1000, state)
        next(steps)
        sidecar.die()
        until(lambda: "no connection to the sidecar" in caplog.text, "the warning")
        for _ in range(20):
            next(steps)
        assert ckpt.saves_failed >= 9
        assert caplog.text.count("no connection to the sidecar (") == 1
        sidecar.start(0)
        until(lambda: "saves continue" in caplog.text, "the reconnect")
        ckpt.save(500, state).wait(timeout=HANG_SECONDS)
        steps.close()


def test_a_staged_save_is_staged_again_after_a_crash(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.ones(1)}
        sidecar.faults.delay_seconds["Stage"] = 3600
        handle = ckpt.save(1, state)
        sidecar.wait_for(Stage)
        sidecar.die()
        sidecar.faults.delay_seconds.clear()
        sidecar.start(0)
        handle.wait(timeout=HANG_SECONDS)


def test_a_missing_sidecar_is_raised_where_the_script_asks_for_errors(
    sidecar: WatchedSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    with holdfast.Checkpointer(on_save_error="raise") as ckpt:
        ckpt.save(1, {"t": torch.zeros(1)}).wait(timeout=HANG_SECONDS)
        sidecar.die()
        until(lambda: "no connection to the sidecar" in caplog.text, "the end")
        with pytest.raises(UnavailableError):
            ckpt.save(2, {"t": torch.zeros(1)})


def test_nothing_to_restore_needs_no_sidecar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = WatchedSidecar(tmp_path / "shared", tmp_path / "node")
    variables = fake.environment(
        HOLDFAST_ROUND="0", HOLDFAST_RESTORE_STEP="", HOLDFAST_INTERVAL_STEPS="5"
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("holdfast.places.pod._FIRST_CONNECT_SECONDS", 0.01)
    monkeypatch.setattr("holdfast.checkpoint.saving._BUSY_WAIT_SECONDS", 0.01)
    with holdfast.Checkpointer() as ckpt:
        assert list(ckpt.steps(7, {"t": torch.zeros(1)})) == list(range(7))
        assert ckpt.saves_failed == 2
