"""Which connections stay open on a port when many others arrive."""

from __future__ import annotations

from collections.abc import Container

from holdfast_core.net.admission import Admission, Places

PLACES = Places(
    unauthenticated=4, unauthenticated_per_address=2, expected=3, known=3, known_per_name=2
)


class Port:
    def __init__(self, expected: Container[str] = frozenset()) -> None:
        self.closed: list[str] = []
        self.admission: Admission[str] = Admission(
            PLACES, self.closed.append, expected=lambda: expected
        )

    def enter(self, *connections: str) -> None:
        """Admit connections, each given as `address/number`."""
        for connection in connections:
            self.admission.enter(connection, connection.split("/")[0])


def test_an_address_displaces_its_oldest_connection() -> None:
    port = Port()
    port.enter("a/1", "b/1", "a/2", "a/3")
    assert port.closed == ["a/1"]
    assert len(port.admission) == 3


def test_the_address_that_holds_most_makes_room() -> None:
    port = Port()
    port.enter("a/1", "b/1", "b/2", "c/1", "d/1")
    assert port.closed == ["b/1"]


def test_many_addresses_hold_no_more_than_few_places() -> None:
    port = Port()
    port.enter(*(f"{number}/1" for number in range(1000)))
    assert len(port.admission) == PLACES.unauthenticated
    assert port.admission.displaced == 1000 - PLACES.unauthenticated


def test_unknown_addresses_do_not_displace_an_expected_address() -> None:
    port = Port(expected={"member"})
    port.enter("member/1")
    port.enter(*(f"{number}/1" for number in range(1000)))
    assert "member/1" not in port.closed
    assert port.admission.is_known("member/1", "pod")


def test_pods_that_share_an_expected_address_may_all_begin_at_once() -> None:
    port = Port(expected={"node"})
    port.enter("node/1", "node/2", "node/3")
    assert port.closed == []
    port.enter("node/4")
    assert port.closed == ["node/1"]


def test_unknown_addresses_do_not_displace_a_known_caller() -> None:
    port = Port()
    port.enter("x/1")
    assert port.admission.is_known("x/1", "pod")
    port.enter(*(f"{number}/1" for number in range(1000)), *(f"x/{n}" for n in range(2, 100)))
    assert "x/1" not in port.closed


def test_the_address_of_a_known_caller_is_expected_from_then_on() -> None:
    port = Port()
    port.enter("x/1")
    assert port.admission.is_known("x/1", "pod")
    port.admission.leave("x/1")
    port.enter("x/2")
    port.enter(*(f"{number}/1" for number in range(1000)))
    assert "x/2" not in port.closed


def test_a_caller_that_lost_its_place_is_not_known() -> None:
    port = Port()
    port.enter("a/1", "a/2", "a/3")
    assert not port.admission.is_known("a/1", "pod")
    assert len(port.admission) == 2


def test_a_name_displaces_only_its_idle_connections() -> None:
    port = Port(expected={"a", "b", "c"})
    port.enter("a/1", "b/1", "c/1")
    assert port.admission.is_known("a/1", "pod-0")
    assert port.admission.is_known("b/1", "pod-1")
    assert port.admission.is_known("c/1", "pod-1")
    with port.admission.working("b/1"):
        port.enter("b/2")
        assert port.admission.is_known("b/2", "pod-1")
        assert port.closed == ["c/1"]
        with port.admission.working("b/2"):
            port.enter("b/3")
            assert not port.admission.is_known("b/3", "pod-1"), "all of its places are in use"
    assert port.closed == ["c/1"]


def test_known_callers_are_bounded_in_all() -> None:
    port = Port(expected={"a", "b", "c", "d"})
    port.enter("a/1", "b/1", "c/1")
    for number, connection in enumerate(("a/1", "b/1", "c/1")):
        assert port.admission.is_known(connection, f"pod-{number}")
    port.enter("d/1")
    assert port.admission.is_known("d/1", "pod-3")
    assert port.closed == ["a/1"]
    assert len(port.admission) == PLACES.known
