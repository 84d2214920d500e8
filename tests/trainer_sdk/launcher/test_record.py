"""The record of the newest forked round survives the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launcher.pod import RoundRecord
from holdfast_core.errors import FormatError
from holdfast_core.ids import RestartRound


def test_an_absent_record_is_read_as_none(tmp_path: Path) -> None:
    assert RoundRecord(tmp_path / "round.json").read() is None


def test_a_later_process_reads_the_record(tmp_path: Path) -> None:
    RoundRecord(tmp_path / "round.json").write(RestartRound(7))
    RoundRecord(tmp_path / "round.json").write(RestartRound(8))
    assert RoundRecord(tmp_path / "round.json").read() == 8
    assert [path.name for path in tmp_path.iterdir()] == ["round.json"]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"round": "x"}'])
def test_damage_is_an_error_and_not_a_fresh_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "round.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"round\.json"):
        RoundRecord(path).read()
