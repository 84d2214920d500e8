"""Stamps of steps: what counts as done, and what a failure reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.config import Bed, digest
from testbed.shell import BedError
from testbed.steps import Step, is_done, run_steps


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path, local=True)


def counting(bed: Bed, inputs: tuple[str, ...]) -> tuple[Step, list[int]]:
    runs: list[int] = []
    output = bed.root / "made"

    def action(_: Path) -> None:
        runs.append(1)
        output.write_text("x")

    return Step("make it", action, inputs, [output]), runs


def test_a_done_step_is_not_run_again(bed: Bed) -> None:
    step, runs = counting(bed, ("v1",))
    run_steps([step], bed)
    run_steps([step], bed)
    assert len(runs) == 1


def test_other_inputs_run_it_again(bed: Bed) -> None:
    first, _ = counting(bed, ("v1",))
    run_steps([first], bed)
    second, _ = counting(bed, ("v2",))
    assert not is_done(second, bed.stamps)


def test_a_lost_output_runs_it_again(bed: Bed) -> None:
    step, runs = counting(bed, ("v1",))
    run_steps([step], bed)
    (bed.root / "made").unlink()
    run_steps([step], bed)
    assert len(runs) == 2


def test_a_lost_image_runs_it_again(bed: Bed) -> None:
    step = Step("image", lambda _: None, ("v1",), present=lambda: False)
    run_steps([step], bed)
    assert not is_done(step, bed.stamps)


def test_a_failure_leaves_no_stamp_and_names_step_log_and_advice(bed: Bed) -> None:
    def action(log: Path) -> None:
        log.write_text("line before the end\nno space left\n")
        raise BedError("exit 1")

    step = Step("build etcd", action, advice="is the disk full?")
    with pytest.raises(BedError) as caught:
        run_steps([step], bed)
    text = str(caught.value)
    assert "build etcd" in text
    assert str(bed.logs / "build-etcd.log") in text
    assert "no space left" in text
    assert caught.value.advice == "is the disk full?"
    assert not is_done(step, bed.stamps)


def test_a_live_step_keeps_a_stamp_of_its_own_name(bed: Bed) -> None:
    bed.prepare()
    (bed.stamps / "cluster").write_text("mine")
    run_steps([Step("cluster", lambda _: None, always=True)], bed)
    assert (bed.stamps / "cluster").read_text() == "mine"


def test_digest_separates_its_parts(tmp_path: Path) -> None:
    assert digest("ab", "c") != digest("a", "bc")


def test_digest_of_a_folder_sees_a_renamed_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = digest(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest(tmp_path) != before
