"""Visits as processes: their measurements, their failures, and the processes and files that they leave."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.datapath import visit
from benchmarks.datapath.ours import SAVERS, Restoring
from benchmarks.datapath.parts import OURS, Part, Participant
from benchmarks.datapath.saver import Started
from benchmarks.datapath.state import differences, emptied, make
from benchmarks.datapath.visit import Options
from benchmarks.datapath.visits import Run, visit_part
from tests.support.hang import HANG_SECONDS

from holdfast_core.node.tier import DiskNodeTier


def run(tmp_path: Path, lines: list[str], timeout_seconds: float = HANG_SECONDS) -> Run:
    return Run(tmp_path, 1, 2, 0.1, timeout_seconds, lines.append)


def test_who_fails_in_the_first_round_is_named_and_not_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    part = Part("save", ("A1",), (Participant("nobody", "save", "benchmarks.no_such_module"),), 1)
    (record,) = visit_part(run(tmp_path, lines), part)
    assert (record.round, record.name, record.result) == (0, "nobody", None)
    assert record.error == "ModuleNotFoundError: No module named 'benchmarks.no_such_module'"
    (line,) = lines
    assert "FAILED: ModuleNotFoundError" in line
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_a_visit_that_does_not_end_is_ended(tmp_path: Path) -> None:
    part = Part("limits", (), (Participant("loopback", "limit", OURS),), 1)
    (record,) = visit_part(run(tmp_path, [], timeout_seconds=0.01), part)
    assert record.error.startswith("not done after 0.01 s")


def test_saves_are_checked_bit_by_bit(tmp_path: Path) -> None:
    found = visit.save(Options("save", "holdfast", OURS, str(tmp_path), 1, 2, check=True))
    assert len(found["steady"]) == 2
    for save in (found["first"], *found["steady"]):
        assert 0 < save["blocked"] <= save["complete"] <= save["durable"]
    assert found["stored_bytes"] >= found["bytes"] > 0
    json.dumps(found)


def test_a_participant_that_reads_back_something_else_has_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful:
        def __init__(self, state: object, directory: Path) -> None:
            self._path = directory / "file"

        def start(self, step: int) -> Started:
            self._path.write_bytes(b"nothing of it")
            return Started(self._path, lambda: None, disposable=False)

        def load(self, path: Path, into: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(SAVERS, "forgetful", Forgetful)
    with pytest.raises(ValueError, match="differ when they are read back"):
        visit.save(Options("save", "forgetful", OURS, str(tmp_path), 1, 1, check=True))


def test_the_side_without_digests_has_none_and_the_other_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make(1)
    has_digests: dict[str, bool] = {}
    for name in ("holdfast-digests-on", "holdfast-digests-off"):
        directory = tmp_path / name
        directory.mkdir()
        with monkeypatch.context() as patch:  # the saver replaces `sys.executable`
            patch.setattr(sys, "executable", sys.executable)
            saver = SAVERS[name](state, directory)
        saver.start(1).wait()
        saver.close()
        tier = DiskNodeTier(directory / "holdfast" / "tier", fill_limit=1.0)
        tier.open()
        (record,) = tier.list_shards()
        with tier.open_shard(record.ref) as reader:
            has_digests[name] = any(reader.table.digests)
    assert has_digests == {"holdfast-digests-on": True, "holdfast-digests-off": False}
    target = emptied(state)
    with Restoring(tmp_path / "holdfast-digests-on" / "holdfast") as restoring:
        restoring.restore(target)
    assert differences(state, target) == []
