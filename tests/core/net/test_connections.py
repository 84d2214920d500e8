"""Which connections of a port stay open when many others arrive."""

from __future__ import annotations

import pytest

from holdfast_core.net import ConnectionLimits, Connections

LIMITS = ConnectionLimits(handshakes=3, authenticated=3, per_caller=2)


@pytest.mark.fault("Strangers want the places of members")
def test_strangers_replace_the_oldest_stranger_only() -> None:
    closed: list[str] = []
    table: Connections[str] = Connections(LIMITS, closed.append)
    table.add("member")
    assert table.authenticate("member", "pod")
    for number in range(1000):
        table.add(f"stranger {number}")
    assert closed == [f"stranger {number}" for number in range(997)]
    assert len(table) == 4
    assert not table.authenticate("stranger 0", "pod"), "it was replaced"
    assert table.authenticate("stranger 999", "pod")


def test_a_caller_replaces_its_own_oldest_connection_and_none_of_another() -> None:
    closed: list[str] = []
    table: Connections[str] = Connections(LIMITS, closed.append)
    for connection, caller in (("a/1", "a"), ("b/1", "b"), ("a/2", "a")):
        table.add(connection)
        assert table.authenticate(connection, caller)
    table.remove("b/1")
    table.add("a/3")
    assert table.authenticate("a/3", "a")
    assert closed == ["a/1"]


def test_authenticated_connections_are_bounded_in_all() -> None:
    closed: list[str] = []
    table: Connections[str] = Connections(LIMITS, closed.append)
    for caller in "abcd":
        table.add(caller)
    assert closed == ["a"]
    table.remove("d")
    for caller in "bc":
        assert table.authenticate(caller, caller)
    for caller in "ef":
        table.add(caller)
    assert table.authenticate("e", "e")
    assert not table.authenticate("f", "f")
    table.remove("b")
    assert table.authenticate("f", "f")
