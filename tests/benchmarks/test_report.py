"""The format of results: verdicts, merging, the file, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.report import Figure, at_least, at_most, for_orientation, merged, not_measured


@pytest.mark.parametrize(
    ("figure", "value", "ok", "bound", "word"),
    [
        pytest.param(
            at_most("A1", [3.0, 1.0, 2.0], "x", 2.0), 2.0, True, "<=", "yes", id="at-most"
        ),
        pytest.param(at_most("A1", [2.1], "x", 2.0), 2.1, False, "<=", "NO", id="over"),
        pytest.param(at_least("A2", [0.8, 0.9], "x", 0.85), 0.85, True, ">=", "yes", id="at-least"),
        pytest.param(at_least("A2", [0.7], "x", 0.85), 0.7, False, ">=", "NO", id="under"),
        pytest.param(at_most("A1", [2.0004], "x", 2.0), 2.0, True, "<=", "yes", id="as-shown"),
        pytest.param(for_orientation("limit x", [4.0], "y"), 4.0, None, "<=", "", id="no-target"),
        pytest.param(
            not_measured("A7", "no dedupe", target=0.5), None, None, "<=", "not measured", id="none"
        ),
    ],
)
def test_verdict(
    figure: Figure, value: float | None, ok: bool | None, bound: str, word: str
) -> None:
    assert (figure.value, figure.ok, figure.bound, report.verdict(figure)) == (
        value,
        ok,
        bound,
        word,
    )


def test_all_values_are_kept() -> None:
    figure = at_least("A2", [0.70004, 0.9], "x", 0.85, what="a share")
    assert figure.details == {
        "bound": ">=",
        "what": "a share",
        "values": [0.7, 0.9],
        "min": 0.7,
        "max": 0.9,
    }
    assert figure.repetitions == 2


def test_new_figures_replace_old_ones_in_order_of_their_numbers() -> None:
    old = [at_most("A10", [1], "x", 1), at_most("A2", [1], "x", 1), at_most("A1-dcp", [1], "x", 1)]
    new = [at_most("A2", [5], "x", 1), at_most("A1", [1], "x", 1)]
    found = merged(old, new)
    assert [(f.id, f.value) for f in found] == [("A1", 1), ("A1-dcp", 1), ("A2", 5), ("A10", 1)]


def test_a_file_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    figures = [at_least("A2", [0.9], "x", 0.85), not_measured("A7", "no dedupe")]
    assert report.read("datapath") == []
    path = report.write("datapath", figures)
    assert report.read("datapath") == figures
    assert [p.name for p in path.parent.iterdir()] == ["datapath.json"]
    assert list(json.loads(path.read_text())[0]) == [
        "id",
        "value",
        "unit",
        "target",
        "ok",
        "repetitions",
        "details",
    ]


def test_a_write_that_dies_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    before = [at_most("A1", [1.0], "x", 2)]
    report.write("datapath", before)
    with pytest.raises(TypeError):  # fails while the text is generated
        report.write("datapath", [at_most("A1", [2.0], "x", 2, strange=object())])
    assert report.read("datapath") == before


def test_table() -> None:
    text = report.table([at_least("A2", [0.5], "of disk", 0.85), not_measured("A7", "no dedupe")])
    assert text.splitlines()[2:] == [
        "| A2 | 0.5 | of disk | >= 0.85 | NO | 1 | 0.5 | 0.5 |",
        "| A7 |  |  |  | not measured | 0 |  |  |",
    ]
