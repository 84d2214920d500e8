"""The operator process is killed at each of its writes, and writes arrive late (docs/faults.md)."""

from __future__ import annotations

from itertools import count

import pytest
from tests.support.operator.api_proxy import ApiProxy, Hold, LoseReply, Rule, writes
from tests.support.operator.operator_bed import OperatorBed, training_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def restart(bed: OperatorBed) -> None:
    """Kill the operator and start it again, as the kubelet restarts its container."""
    bed.kill_operator()
    bed.start_operator()


def kill_at(bed: OperatorBed, proxy: ApiProxy, write: int) -> Rule:
    """Kill the operator when the API server has carried out this write. It does not get the reply."""
    return proxy.add(LoseReply(lambda: restart(bed)), writes, skip=write, times=1)


def endless_job() -> dict[str, object]:
    job = training_job()
    job["spec"]["failurePolicy"] = {"maxRestarts": 1000}
    return job


@pytest.mark.fault("The operator is killed at every write (API server with real watches)")
def test_an_operator_that_is_killed_at_any_write_of_a_start_is_replaced(
    empty_bed: OperatorBed, proxy: ApiProxy
) -> None:
    """A new job starts for each write, until one starts without reaching the write."""
    bed = empty_bed
    bed.start_operator()
    for write in count():
        death = kill_at(bed, proxy, write)
        bed.train(endless_job())
        assert bed.status()["restartRound"] == 0
        assert bed.status().get("restarts", 0) == 0
        assert bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 0)]
        proxy.remove(death)  # a later write must not start an operator while the test ends
        if not death.hits:
            break
        bed.plane.request("DELETE", bed.path("trainingjobs", "gpt"))
        bed.until("the job goes", lambda: bed.is_gone(bed.path("trainingjobs", "gpt")))
        for name in bed.pod_names():
            bed.kubelet.delete_pod(name)
    assert write >= 8


@pytest.mark.fault("The operator is killed at every write (API server with real watches)")
def test_an_operator_that_is_killed_at_any_write_of_a_recovery_is_replaced(
    empty_bed: OperatorBed, proxy: ApiProxy
) -> None:
    """A pod is lost for each write, until a recovery does not reach the write. Each costs one round."""
    bed = empty_bed
    bed.start_operator()
    bed.train(endless_job())
    bed.store_at(0, 40)
    for write in count():
        death = kill_at(bed, proxy, write)
        bed.lose(1)
        bed.until_recovered(write + 1)
        proxy.remove(death)
        if not death.hits:
            break
    assert write >= 6


@pytest.mark.fault("The leading operator is stopped (SIGSTOP) and continues later")
def test_a_write_that_arrives_after_its_operator_was_replaced_changes_nothing(
    empty_bed: OperatorBed, proxy: ApiProxy
) -> None:
    """Each write of a recovery in turn is held back on its way, until the next operator has recovered."""
    bed = empty_bed
    bed.start_operator()
    bed.train(endless_job())
    bed.store_at(0, 40)
    for write in count():
        late = proxy.add(Hold(lambda: restart(bed)), writes, skip=write, times=1)
        bed.lose(1)
        bed.until_recovered(write + 1)
        status, pods = bed.status(), bed.pod_names()
        proxy.remove(late)
        if not late.hits:
            break
        (held,) = late.hits
        bed.until("it arrives", lambda: any(w.call is held for w in proxy.writes))  # noqa: B023
        for key in ("restartRound", "members", "restorePoint", "restarts", "lineage"):
            assert bed.status().get(key) == status.get(key), late.hits
        assert bed.pod_names() == pods
    assert write >= 6


@pytest.mark.fault("The leading operator is stopped (SIGSTOP) and continues later")
def test_a_pod_that_is_created_late_for_an_older_round_is_deleted(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """The create of an operator that was replaced arrives when the next round trains."""
    late = proxy.add(
        Hold(lambda: restart(gang)), lambda c: c.verb == "post" and c.plural == "pods", times=1
    )
    gang.lose(1)
    gang.until_recovered(1)
    assert late.hits
    gang.lose(1)
    gang.until_recovered(2)
    old = gang.pod(1, 1)
    created = [w for w in proxy.writes if w.call.verb == "post" and w.call.plural == "pods"]
    proxy.remove(late)
    gang.until(
        "it is created",
        lambda: (
            len([w for w in proxy.writes if w.call.plural == "pods" and w.call.verb == "post"])
            > len(created)
        ),
    )
    gang.until("it is deleted", lambda: old not in gang.pod_names())
    assert gang.pod_names() == [gang.pod(0, 0), gang.pod(1, 2)]
    assert gang.status()["restartRound"] == 2
    proxy.writes.remove(next(w for w in created if w.reply["metadata"]["name"] == old))
