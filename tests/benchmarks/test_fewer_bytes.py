"""The benchmark of A7 meets its targets."""

from __future__ import annotations

from benchmarks.datapath.figures import OURS, of_fewer_bytes
from benchmarks.datapath.visit import Options, fewer_bytes
from benchmarks.datapath.visits import Record


def test_every_case_is_within_its_target() -> None:
    """The counts do not depend on the machine's speed, so this test can use the code of `make bench`."""
    options: Options = None  # type: ignore[assignment]  # it asks for nothing
    found = of_fewer_bytes([Record("fewer-bytes", 0, OURS, fewer_bytes(options))])
    assert [(figure.id, figure.ok) for figure in found] == [
        ("A7", True),
        ("A7-frozen", True),
        ("A7-both", True),
    ]
    assert all(figure.value is not None and figure.value > 0 for figure in found)


def test_a_run_that_failed_is_no_figure() -> None:
    found = of_fewer_bytes([Record("fewer-bytes", 0, OURS, None, "no room")])
    assert [figure.ok for figure in found] == [None, None, None]
