"""The benchmark of sweeps: the played store against the real client, and what a measurement leaves."""

from __future__ import annotations

from benchmarks.ranks.page import page
from benchmarks.ranks.played_store import PAGE, Names
from benchmarks.ranks.sweep import figures, is_figure, measure


def listed(names: Names, prefix: str, delimiter: str = "") -> list[str]:
    """Return all keys and folders of a listing, page after page."""
    found: list[str] = []
    token = ""
    while True:
        objects, folders, token = names.page(prefix, token, delimiter)
        assert len(objects) + len(folders) <= PAGE
        found += objects + folders
        if not token:
            return found


def test_pages_of_a_listing_have_every_name_once() -> None:
    names = [f"job/{kind}/{n:05d}" for kind in ("a", "b") for n in range(2 * PAGE + 1)]
    assert listed(Names(names), "job/a/") == names[: 2 * PAGE + 1]


def test_folders_are_listed_once_across_pages() -> None:
    names = Names(f"job/a/{n:05d}/{i}" for n in range(PAGE + 2) for i in range(3))
    assert listed(names, "job/a/", "/") == [f"job/a/{n:05d}/" for n in range(PAGE + 2)]


def test_deleted_names_are_not_listed() -> None:
    names = Names(["a/1", "a/2", "b/1"])
    names.delete("a/1")
    names.delete("a/9")
    assert (listed(names, "a/"), names.left()) == (["a/2"], ["a/2", "b/1"])


def test_a_measurement_deletes_exactly_what_is_not_needed() -> None:
    # `measure` raises if the store holds other objects than the newest checkpoint needs.
    found = {f.id: f for f in measure(220, 2)}
    counts = {
        f.details["store_phase"]: f.details["count"] for f in found.values() if f.target is None
    }
    # 22 have no manifest, 197 are pruned. The first two of a hundred go when no other needs them. The
    # newest checkpoint needs the third.
    assert counts == {"sweep": 22, "prune": 197, "second sweep": 2}
    assert {f.id for f in found.values() if f.target is not None} == {"L7-cpu", "L7-memory"}
    assert all(map(is_figure, found.values()))


def test_the_page_shows_the_phases_of_the_store() -> None:
    cost = {"count": 3, "wall_seconds": 2.5, "cpu_seconds": 1.5, "peak_mib": 40.0}
    text = page(figures({"sweep": cost}, 10, 2, 99))
    assert "| sweep, 10 checkpoints of 2 ranks | 1.5 | 2.5 | 40.0 | 3 |" in text
