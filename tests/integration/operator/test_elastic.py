"""An elastic gang shrinks and grows: a real API server, a real operator process and played sidecars."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.operator.operator_bed import DIGEST, OperatorBed, training, training_job
from tests.support.operator.progress import progress_of

from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.names import placeholder_name

pytestmark = pytest.mark.integration


def only_pods(bed: OperatorBed, *names: str) -> None:
    def reached() -> bool:
        bed.kubelet.confirm_deletes()
        return bed.pod_names() == sorted(names)

    bed.until(f"pods {names}", reached)


def test_a_gang_trains_with_one_worker_until_a_placeholder_has_a_node(
    empty_bed: OperatorBed,
) -> None:
    """The operator is killed while the placeholder waits, and after the growth is decided."""
    bed = empty_bed
    bed.start_operator()
    bed.add_store()
    every = {"storeRef": {"name": "main"}, "every": {"steps": 10}}
    job = training_job(peer={"copies": 0}, object=every)
    job["spec"]["elastic"] = {"min": 1, "shrinkAfterSeconds": 30, "growAfterSeconds": 60}
    bed.create(job)
    bed.kubelet.run_pod(bed.pod(0, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    assert bed.status()["members"] == [1]
    only_pods(bed, bed.pod(0, 1))
    alone = bed.kubelet.run_pod(bed.pod(0, 1))
    bed.until("ROUND", lambda: alone.rounds and all(m.address for m in alone.rounds[-1].members))
    assert alone.rounds[-1].workers == 1
    state = replace(training(2, 1, 40), progress=progress_of(40), last_replicated=None)
    bed.kubelet.publish(bed.pod(0, 1), state)
    bed.until("Running", lambda: bed.condition("Running").get("status") == "True")
    assert bed.condition("WorkersMissing")["reason"] == "Shrunk"
    bed.until("its ready worker", lambda: bed.status().get("readyWorkers") == "1/2")

    placeholder = placeholder_name("gpt", bed.uid(), 1)
    bed.until("the placeholder", lambda: placeholder in bed.pod_names())
    bed.kill_operator()
    bed.kubelet.bind_pod(placeholder)
    bed.start_operator()
    bed.until("the growth", lambda: bed.condition("Resizing").get("reason") == "Stopping")
    assert bed.status()["elastic"] == {"workers": 2, "ofWorkers": 2}
    bed.kill_operator()
    bed.start_operator()
    bed.until("the request to stop", lambda: "stop" in [name for name, _ in alone.calls])
    assert placeholder in bed.pod_names(), "it keeps the node while the gang saves"
    saved = RestorePoint(Step(60), RestartRound(1), DIGEST)
    stopped = replace(
        training(9, 1, 60),
        progress=progress_of(60),
        last_local=saved,
        last_replicated=None,
        last_persisted=saved,
        finished=True,
    )
    bed.kubelet.publish(bed.pod(0, 1), stopped)
    bed.until("round 2", lambda: bed.status().get("restartRound") == 2)
    assert bed.status()["members"] == [2, 2]
    only_pods(bed, bed.pod(0, 2), bed.pod(1, 2))
    assert bed.status()["restarts"] == 0
    assert "elastic" not in bed.status()
