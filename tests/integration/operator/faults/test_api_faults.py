"""A pod is lost while the API server misbehaves towards the real operator (docs/faults.md).

The operator recovers during the fault if it can, and otherwise after it, with one round.
"""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from tests.support.operator.api_proxy import (
    ApiProxy,
    Call,
    Edit,
    Fault,
    Refuse,
    Reset,
    Silence,
    everything,
    lists_of_workers,
    status_writes,
    streamed_lists,
    watches,
    writes,
)
from tests.support.operator.operator_bed import OperatorBed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def leads(bed: OperatorBed) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{bed.metrics_port}/metrics") as reply:
        return b"holdfast_operator_leads 1.0" in reply.read()


def pods_of(bed: OperatorBed) -> str:
    return f"/api/v1/namespaces/{bed.namespace}/pods"


@pytest.mark.fault("The API server answers 5xx to everything")
@pytest.mark.fault("The API server refuses connections")
@pytest.mark.fault("The API server answers 403 to everything")
@pytest.mark.parametrize(
    "fault",
    [
        Refuse(500, "InternalError"),
        Refuse(503, "ServiceUnavailable"),
        Refuse(403, "Forbidden"),
        Refuse(429, "TooManyRequests", retry_after=1),
        Reset(),
        Silence(),
        None,
    ],
    ids=["500", "503", "403", "429", "reset", "no answer", "refused connections"],
)
def test_a_pod_that_is_lost_while_every_request_fails_is_replaced_afterwards(
    empty_bed: OperatorBed, proxy: ApiProxy, fault: Fault | None
) -> None:
    """The outage lasts until the operator may not write any more. Its process does not end."""
    gang = empty_bed
    gang.start_with_gang(HOLDFAST_LEASE_SECONDS="3")
    if fault is None:
        proxy.close_port()
    else:
        proxy.add(fault)
        proxy.cut_watches()
    gang.lose(1)
    gang.until("the lease is not renewed any more", lambda: not leads(gang))
    assert gang.process.poll() is None
    assert gang.status()["restartRound"] == 0
    if fault is None:
        proxy.open_port()
    else:
        proxy.heal()
    gang.until_recovered(1)
    assert gang.process.poll() is None
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("The API server answers every status write with 409")
@pytest.mark.fault("The API server refuses writes with 409, 422, 429, 500 or 503")
@pytest.mark.parametrize("status", [409, 422, 429, 500, 503])
def test_writes_that_are_refused_are_repeated_until_they_succeed(
    gang: OperatorBed, proxy: ApiProxy, status: int
) -> None:
    """Reads and the lease work. The sidecars are not sealed before the round is written."""
    rule = proxy.add(Refuse(status, "Conflict" if status == 409 else "", retry_after=1), writes)
    gang.lose(1)
    gang.until("several attempts", lambda: len(rule.hits) >= 5)
    assert gang.kubelet.sidecars[gang.pod(0, 0)].round == 0
    proxy.heal()
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("The API server answers every status write with 409")
def test_without_a_status_write_nothing_else_is_written(gang: OperatorBed, proxy: ApiProxy) -> None:
    """Each status write is a conflict. No pod is created or deleted for a round that is not written."""
    before = len(proxy.writes)
    rule = proxy.add(Refuse(409, "Conflict"), status_writes)
    gang.lose(1)
    gang.until("several attempts", lambda: len(rule.hits) >= 8)
    later = (w.call for w in proxy.writes[before:] if w.call.plural not in ("leases", "events"))
    # The proxy has no record of writes that it refuses: a status write here began before the rule.
    assert [call for call in later if not status_writes(call)] == []
    proxy.heal()
    gang.until_recovered(1)


def gone_event() -> dict[str, Any]:
    return {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}


@pytest.mark.fault("The API server answers every watch with 410")
def test_a_pod_is_replaced_during_a_storm_of_410(gang: OperatorBed, proxy: ApiProxy) -> None:
    """Every watch is refused as too old, so each change is found by a LIST."""
    rule = proxy.add(Refuse(410, "Expired"), watches())
    assert proxy.send_to_watches(gone_event()) > 0
    gang.until("refused watches", lambda: len(rule.hits) >= 20)
    gang.lose(1)
    gang.until_recovered(1)
    assert gang.process.poll() is None


@pytest.mark.fault("The API server sends an ERROR inside of a watch")
@pytest.mark.parametrize(
    "event",
    [
        {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError"}},
        {"type": "ERROR", "object": {"kind": "Status"}},
        gone_event(),
    ],
    ids=["500", "no code", "410"],
)
def test_an_error_inside_each_watch_costs_no_change(
    gang: OperatorBed, proxy: ApiProxy, event: dict[str, Any]
) -> None:
    gap = proxy.add(Refuse(503, "ServiceUnavailable"), watches())
    assert proxy.send_to_watches(event) > 0
    gang.lose(1)
    gang.until("watches begin again", lambda: len(gap.hits) >= 10)
    proxy.remove(gap)
    gang.until_recovered(1)
    assert gang.process.poll() is None


@pytest.mark.fault("The connections of all watches are half open")
def test_watches_that_are_half_open_are_replaced(empty_bed: OperatorBed, proxy: ApiProxy) -> None:
    """The connections stay open and deliver nothing, so only the read time-out ends them."""
    gang = empty_bed
    gang.start_with_gang(HOLDFAST_WATCH_SILENCE_SECONDS="8")
    assert proxy.freeze_watches() > 0
    gang.lose(1)
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("A pod is deleted in a gap of the watch")
def test_a_pod_that_is_deleted_in_a_gap_of_the_watch_is_replaced(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """The first LISTs after the gap come from an API server that is behind: they still have the pod."""
    before = gang.plane.request("GET", pods_of(gang))
    gap = proxy.add(Refuse(503, "ServiceUnavailable"), watches("pods"))
    behind = proxy.add(Edit(lambda page: before), lists_of_workers, times=4)
    proxy.cut_watches(watches("pods"))
    gang.lose(1)
    gang.until("old LISTs", lambda: len(behind.hits) == 4)
    proxy.remove(gap)
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("A pod is deleted in a gap of the watch")
def test_a_list_that_lacks_pods_that_exist_deletes_and_replaces_nothing(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """Before a round begins, the API server is asked for each pod that is missing in the copy.

    The watch continues from an empty LIST. The operator lists the pods again, and then recovers.
    """
    gap = proxy.add(Refuse(503, "ServiceUnavailable"), watches("pods"))
    partial = proxy.add(Edit(lambda page: {**page, "items": []}), lists_of_workers)
    proxy.cut_watches(watches("pods"))
    gang.until("empty LISTs", lambda: len(partial.hits) >= 4)
    text = "the API server has pods that the watch does not show"
    gang.until("the pods are looked up", lambda: text in gang.log())
    assert gang.status()["restartRound"] == 0
    proxy.remove(gap)
    # The watches that begin after empty LISTs never show the pods, which do not change any more.
    gang.until("watches", lambda: proxy.open_watches(watches("pods")) == 2)
    proxy.remove(partial)
    gang.lose(1)
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault(
    "A streamed list of the API server ends, fails or falls silent before its last object"
)
def test_a_streamed_list_that_lacks_pods_that_exist_deletes_and_replaces_nothing(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """The watch that begins with this list never shows the pods either."""
    proxy.hidden = set(gang.pod_names())
    pages = proxy.add(Edit(lambda page: page), lists_of_workers)
    proxy.send_to_watches({"type": "ERROR", "object": {"code": 410}}, watches("pods"))
    text = "the API server has pods that the watch does not show"
    gang.until("the pods are looked up", lambda: text in gang.log())
    assert pages.hits == []
    assert gang.status()["restartRound"] == 0
    proxy.hidden = set()
    gang.lose(1)
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("The API server has no streamed lists")
def test_an_api_server_without_streamed_lists_is_asked_for_pages(
    empty_bed: OperatorBed, proxy: ApiProxy
) -> None:
    """Kubernetes 1.31 and 1.33 do not have the feature unless it is switched on."""
    refused = proxy.add(Refuse(422, "Invalid"), streamed_lists())
    empty_bed.start_with_gang()
    empty_bed.lose(1)
    empty_bed.until_recovered(1)
    assert {call.plural for call in refused.hits} >= {"pods", "nodes", "leases", "trainingjobs"}
    assert "watch of" not in empty_bed.log(), "it is no error"


@pytest.mark.fault("The API server answers every watch with 410")
def test_a_list_that_expires_between_its_pages_is_repeated(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """The first page promises a second one, which has expired, as if etcd had been compacted meanwhile."""

    def first_page(page: dict[str, Any]) -> dict[str, Any]:
        metadata = {**page["metadata"], "continue": "a-page-that-expires"}
        return {**page, "metadata": metadata, "items": page["items"][:1]}

    gap = proxy.add(Refuse(503, "ServiceUnavailable"), watches("pods"))
    expired = proxy.add(Refuse(410, "Expired"), lambda call: bool(call.page))
    paged = proxy.add(Edit(first_page), lists_of_workers)
    proxy.cut_watches(watches("pods"))
    gang.lose(1)
    gang.until("pages that have expired", lambda: len(expired.hits) >= 4)
    assert gang.status()["restartRound"] == 0
    for rule in (paged, expired, gap):
        proxy.remove(rule)
    gang.until_recovered(1)
    assert gang.status()["restarts"] == 1


@pytest.mark.fault("The API server sends events twice")
def test_events_that_come_twice_change_nothing(gang: OperatorBed, proxy: ApiProxy) -> None:
    """Each event of each watch comes twice, over three lost pods."""
    proxy.replays = True
    proxy.cut_watches(everything)
    for round_ in (1, 2, 3):
        gang.lose(1)
        gang.until_recovered(round_)
    assert gang.status()["restarts"] == 3


def creates_of_pods(call: Call) -> bool:
    return call.verb == "post" and call.plural == "pods" and not call.dry_run


@pytest.mark.fault("An action of the operator fails in each pass, such as a create that is refused")
def test_a_create_that_is_refused_is_named_until_it_succeeds(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """The error ends one action and no pass."""

    def reconciled() -> dict[str, Any]:
        found = (c for c in gang.status().get("conditions", []) if c["type"] == "Reconciled")
        return next(found, {"status": "Unknown", "message": ""})

    proxy.add(Refuse(403, "Forbidden"), creates_of_pods)
    gang.lose(1)
    gang.until("the condition names it", lambda: reconciled()["status"] == "False")
    assert " actions failed: create Pod " in reconciled()["message"]
    proxy.heal()
    gang.until_recovered(1)
    gang.until("the condition turns true", lambda: reconciled()["status"] == "True")
