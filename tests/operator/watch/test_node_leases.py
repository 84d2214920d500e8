"""When a node counts as silent: by the operator's own clock, and only while its watch was current."""

from __future__ import annotations

import pytest
from tests.support.clock import ManualClock

from holdfast_operator.watch.nodes import NodeLeases

THRESHOLD = 20.0


def seen(clock: ManualClock, *nodes: str) -> NodeLeases:
    leases = NodeLeases()
    for node in nodes:
        leases.observe(node, "t0", clock.monotonic())
    return leases


@pytest.mark.parametrize(
    ("name", "advance", "contact_after", "silent", "unproven"),
    [
        ("fresh", 5.0, 5.0, False, False),
        ("stale, and the watch delivered others", 21.0, 20.5, True, False),
        ("stale, but the watch is silent as well", 21.0, 3.0, False, True),
        ("stale, last contact just before the threshold", 30.0, 19.0, False, True),
        ("exactly at the threshold", 20.0, 20.0, True, False),
    ],
)
def test_rule(
    name: str, advance: float, contact_after: float, silent: bool, unproven: bool
) -> None:
    clock = ManualClock()
    leases = seen(clock, "n")
    contact = clock.monotonic() + contact_after
    clock.advance(advance)
    now = clock.monotonic()
    assert leases.is_silent("n", THRESHOLD, now, contact) is silent
    assert leases.needs_confirmation("n", THRESHOLD, now, contact) is unproven


def test_direct_read_confirms_or_clears() -> None:
    clock = ManualClock()
    leases = seen(clock, "n", "m")
    contact = clock.monotonic()
    clock.advance(25)
    leases.observe("n", "t0", clock.monotonic())
    leases.observe("m", "t1", clock.monotonic())
    now = clock.monotonic()
    assert leases.is_silent("n", THRESHOLD, now, contact)
    assert not leases.is_silent("m", THRESHOLD, now, contact)
    assert not leases.needs_confirmation("m", THRESHOLD, now, contact)


def test_node_that_comes_back_is_not_silent() -> None:
    clock = ManualClock()
    leases = seen(clock, "n")
    clock.advance(60)
    assert leases.is_silent("n", THRESHOLD, clock.monotonic(), clock.monotonic())
    leases.observe("n", "t1", clock.monotonic())
    assert not leases.is_silent("n", THRESHOLD, clock.monotonic(), clock.monotonic())


def test_node_without_a_lease_is_unknown() -> None:
    leases = NodeLeases()
    assert leases.stale_seconds("n", 1000.0, 1000.0) is None
    assert not leases.is_silent("n", THRESHOLD, 1000.0, 1000.0)
    assert not leases.needs_confirmation("n", THRESHOLD, 1000.0, 1000.0)


@pytest.mark.fault("A Node object is deleted")
@pytest.mark.parametrize(
    ("name", "advance", "contact_after", "silent", "unproven"),
    [
        ("just missed", 5.0, 5.0, False, False),
        ("missed for long, as the watch of nodes shows", 21.0, 20.5, True, False),
        ("missed for long, but the watch is silent", 21.0, 3.0, False, True),
        ("missed for long, and the watch has delivered nothing yet", 21.0, None, False, True),
    ],
)
def test_a_node_whose_object_is_gone(
    name: str, advance: float, contact_after: float | None, silent: bool, unproven: bool
) -> None:
    """The lease is deleted with the node, so nothing would ever become stale."""
    clock = ManualClock()
    leases = seen(clock, "node-a")
    leases.forget("node-a")
    start = clock.monotonic()
    leases.miss("node-a", start)
    leases.miss("node-a", start + 4.0)
    now = start + advance
    assert leases.stale_seconds("node-a", now, None) == advance, name
    contact = None if contact_after is None else start + contact_after
    assert leases.is_silent("node-a", THRESHOLD, now, contact) is silent
    assert leases.needs_confirmation("node-a", THRESHOLD, now, contact) is unproven


def test_a_direct_read_confirms_that_a_node_is_gone() -> None:
    """Nodes change rarely, so that the watch may show nothing for a minute."""
    clock = ManualClock()
    leases = NodeLeases()
    leases.confirm_missing("node-b", clock.monotonic())
    leases.miss("node-a", clock.monotonic())
    clock.advance(19)
    leases.confirm_missing("node-a", clock.monotonic())
    clock.advance(1)
    now = clock.monotonic()
    assert not leases.is_silent("node-a", THRESHOLD, now, None), "it was read before the threshold"
    leases.confirm_missing("node-a", now)
    assert leases.is_silent("node-a", THRESHOLD, now, None)
    assert not leases.needs_confirmation("node-a", THRESHOLD, now, None)
    assert not leases.is_missing("node-b"), "no pod is bound to it"


@pytest.mark.fault("A pod's event overtakes its new node's")
def test_a_node_that_comes_late_to_the_watch_is_not_missing() -> None:
    """A pod's event may overtake the event of its new node."""
    clock = ManualClock()
    leases = seen(clock)
    leases.miss("node-a", clock.monotonic())
    leases.found("node-a")
    assert leases.stale_seconds("node-a", clock.monotonic() + 100.0, None) is None
    assert not leases.is_silent("node-a", THRESHOLD, clock.monotonic() + 100.0, 1e9)


def test_every_silent_node_is_found_with_or_without_a_pod() -> None:
    clock = ManualClock()
    leases = seen(clock, "a", "b", "c")
    clock.advance(15)
    leases.observe("c", "t1", clock.monotonic())
    clock.advance(10)
    now = clock.monotonic()
    assert leases.silent(THRESHOLD, now, now) == {"a", "b"}
    assert leases.silent(THRESHOLD, now, now - 20.0) == set(), "our own watch is silent"


def test_a_lease_that_was_not_seen_to_change_may_be_of_any_age() -> None:
    """This process has just started, and it must not rely on the clocks of other machines."""
    clock = ManualClock()
    leases = seen(clock, "a")
    leases.observe("a", "t0", clock.monotonic() + 1.0)
    assert leases.is_undated("a")
    leases.observe("a", "t1", clock.monotonic() + 2.0)
    assert not leases.is_undated("a")
    assert not leases.is_undated("no lease"), "it would be avoided for ever"


def test_late_nodes_are_those_that_a_check_must_look_at() -> None:
    leases = NodeLeases()
    leases.observe("fresh", "a", 10.0)
    leases.observe("late", "a", 4.0)
    leases.miss("gone", 9.0)
    assert leases.late(5.0, 10.0, 10.0) == {"late", "gone"}
    leases.observe("late", "b", 10.0)
    leases.found("gone")
    assert leases.late(5.0, 10.0, 10.0) == set()


def test_no_node_is_late_because_the_watch_of_leases_is_silent() -> None:
    leases = NodeLeases()
    leases.observe("living", "a", 99.0)
    leases.observe("dead", "a", 80.0)
    contact = 100.0
    assert leases.late(12.0, 114.0, contact) == {"living", "dead"}, "the watch may be slow"
    for now in (116.0, 1000.0):
        assert leases.late(12.0, now, contact) == {"dead"}
        assert leases.stale_seconds("living", now, contact) == 1.0
    leases.observe("living", "a", 1000.0)  # a direct GET
    assert leases.late(12.0, 1000.0, contact) == {"living", "dead"}
    leases.observe("living", "b", 1001.0)
    assert leases.late(12.0, 1002.0, 1002.0) == {"dead"}


@pytest.mark.fault("The leases of all nodes have grown old while the API server was away")
def test_after_an_outage_a_node_is_late_once_it_has_had_time_to_renew_its_lease() -> None:
    """Both are proven to be silent for longer, which counts where a sidecar does not answer."""
    leases = NodeLeases()
    leases.observe("living", "a", 99.0)
    leases.observe("dead", "a", 80.0)
    assert leases.late(12.0, 1011.0, 1011.0, since=1000.0) == set()
    assert leases.silent(12.0, 1011.0, 1011.0) == {"living", "dead"}
    leases.observe("living", "b", 1011.0)
    assert leases.late(12.0, 1012.0, 1012.0, since=1000.0) == {"dead"}
    assert leases.stale_seconds("dead", 1012.0, 1012.0, since=1000.0) == 12.0


NODES = [f"node-{n}" for n in range(20)]


def renewed_until(at: float, late: int) -> NodeLeases:
    """Return the leases of 20 nodes: all but the last `late` changed at this time, those at 1000."""
    leases = NodeLeases()
    for name in NODES:
        leases.observe(name, "a", 990.0)
        leases.observe(name, "b", 1000.0)
    for name in NODES[: len(NODES) - late]:
        leases.observe(name, "c", at)
    return leases


@pytest.mark.parametrize(
    ("late", "in_doubt"),
    [
        pytest.param(1, False, id="one node is lost"),
        pytest.param(10, False, id="a rack is lost"),
        pytest.param(11, True, id="more than half are late"),
        pytest.param(20, True, id="all are late"),
    ],
)
def test_leases_that_are_late_with_most_others_are_no_evidence(late: int, in_doubt: bool) -> None:
    leases = renewed_until(1025.0, late)
    leases.compare(1030.0)
    stopped = set() if in_doubt else set(NODES[len(NODES) - late :])
    assert leases.late_count == (late if in_doubt else None)
    assert leases.late(12.0, 1030.0, 1030.0) == stopped
    assert leases.silent(20.0, 1030.0, 1030.0) == stopped
    assert leases.stale_seconds(NODES[-1], 1030.0, 1030.0) == (0.0 if in_doubt else 30.0)
    unconfirmed = {n for n in NODES if leases.needs_confirmation(n, 20.0, 1030.0, 1000.0)}
    assert unconfirmed == stopped


@pytest.mark.fault(
    "The leases of most nodes are late at the same time, because the API server or the operator is "
    "slow"
)
def test_a_lost_node_is_found_when_most_leases_are_renewed_again() -> None:
    leases = renewed_until(1000.0, 20)
    leases.compare(1030.0)
    assert leases.silent(20.0, 1030.0, 1030.0) == set()
    for name in NODES[1:]:
        leases.observe(name, "d", 1031.0)
    leases.compare(1032.0)
    assert leases.silent(20.0, 1032.0, 1032.0) == {NODES[0]}


def test_a_node_that_is_missing_is_lost_whatever_the_leases_of_others_say() -> None:
    leases = renewed_until(1000.0, 20)
    leases.miss("gone", 1000.0)
    leases.compare(1030.0)
    assert leases.late(12.0, 1030.0, 1030.0) == {"gone"}
    assert leases.is_silent("gone", 20.0, 1030.0, 1030.0)


def test_the_leases_of_a_small_cluster_are_evidence_if_all_are_late() -> None:
    leases = NodeLeases()
    for name in NODES[:10]:
        leases.observe(name, "a", 1000.0)
    leases.compare(1030.0)
    assert leases.silent(20.0, 1030.0, 1030.0) == set(NODES[:10])


def test_machines_that_are_off_for_good_put_no_other_lease_in_doubt() -> None:
    clock = ManualClock()
    off = [f"off-{n}" for n in range(22)]
    on = [f"on-{n}" for n in range(18)]
    leases = seen(clock, *off, *on)
    began = clock.monotonic()

    def renew(*nodes: str) -> None:
        for node in nodes:
            leases.observe(node, f"t{clock.monotonic()}", clock.monotonic())

    clock.advance(30)
    renew(*on)
    leases.compare(clock.monotonic(), began)
    assert leases.late_count == 22
    clock.advance(900)
    renew(*on)
    leases.compare(clock.monotonic(), clock.monotonic() - 10)
    assert leases.late_count == 22, "the watch was silent, so their age is not known"
    clock.advance(30)
    renew(*on[1:])
    leases.compare(clock.monotonic(), began)
    assert leases.late_count is None
    now = clock.monotonic()
    assert leases.is_silent(on[0], THRESHOLD, now, now), "a node that is lost now is found"
    assert not leases.is_silent(on[1], THRESHOLD, now, now)
