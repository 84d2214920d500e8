"""Loss of one pod or of all pods."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from testbed import faults
from testbed.driver import metrics
from testbed.driver.scenario import SHORT

ENDS = ("input", "output")


def _compressed(job) -> list[float]:
    """Return the bytes that all sidecars have compressed, and the bytes of the results."""

    def texts() -> list[str] | None:
        found = [
            job.kube.proxy_text(job.namespace, name, 7072, "metrics") for name in job.pod_names()
        ]
        return None if None in found else found

    read = job.wait("metrics of all sidecars", texts)
    samples = [sample for text in read for sample in metrics.parse(text)]
    names = (f"holdfast_compression_{end}_bytes_total" for end in ENDS)
    return [sum(value for found, _, value in samples if found == name) for name in names]


def _served_by(job) -> dict[int, str]:
    """Return the tier that served the shard of each of the three ranks, once all sidecars have answered."""
    with ThreadPoolExecutor(4) as pool:

        def of_all_ranks() -> dict[int, str] | None:
            found = metrics.gang(job, pool).restored
            return found if len(found) == 3 else None

        return job.wait("metrics of all sidecars", of_all_ranks)


def _committed_in_this_round(job) -> float:
    """Return the newest step that the coordinator has committed in its round, or -1."""
    steps = job.metric(job.status["coordinator"], "holdfast_committed_step")
    return steps.get('{level="local"}', -1)


def test_a_deleted_pod_is_rehydrated_from_a_peer(scenario):
    """A pod is deleted with a short grace period. Then each pod is evicted, one after another, as by a drain.

    No node is cordoned, because other scenarios start pods there. A cordon alone is nothing to the operator.
    """
    # The evictions must hit the run. The store has no step that is restored: a peer that has not received
    # ROUND yet refuses, and then the store is asked at once.
    job = scenario.start(replace(SHORT, sleep_per_step=0.8), object_every=1000)
    job.wait_replicated(20)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    assert job.status["members"] == [0, 1, 0], "only the lost worker gets a new pod"
    assert _served_by(job)[1] == "peer"
    for worker in range(3):
        scenario.kube.evict_pod(scenario.namespace, job.pod_name(worker))
        job.wait_round(2 + worker)
    assert job.status["members"] == [2, 3, 4]
    evictions = [(r["workers"], r["lostSteps"]) for r in job.status["recoveries"][-3:]]
    assert evictions == [([0], 0), ([1], 0), ([2], 0)], job.status["recoveries"]
    scenario.finish_and_judge(job)


def test_after_the_loss_of_all_pods_no_step_of_a_superseded_history_is_restored(scenario):
    """The newest persisted step is restored. The later steps are trained again and replace the first ones.

    The restored checkpoint was compressed for the store.
    """
    slow = replace(SHORT, sleep_per_step=1.0)  # the failures must hit the run before its end
    job = scenario.start(slow, interval=10, object_every=40, compression="Zstd")
    job.wait_persisted(40)
    before, stored = _compressed(job)
    assert 0 < stored < before
    job.wait_step(52)
    job.kube.lose_pods(job.namespace, [pod["metadata"]["name"] for pod in job.pods()])
    job.wait_round(1)
    assert job.status["restorePoint"]["step"] == 40, "the newest persisted step is restored"
    assert set(_served_by(job).values()) == {"object"}, "no pod is left that has a copy"
    again = job.round
    job.wait("step 50 to be committed again", lambda: _committed_in_this_round(job) >= 50)
    faults.kill_process(scenario.namespace, job.pod_name(0), "trainer", match="holdfast-rank")
    job.wait_round(again + 1)
    point = job.status["restorePoint"]
    assert point["step"] >= 50, "50 was committed again before the rank was killed"
    assert point["round"] == again, "those of the new round count, never round 0's"
    scenario.finish_and_judge(job)
