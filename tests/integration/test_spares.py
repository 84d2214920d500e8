"""A spare pod of real processes takes the place of a lost worker, and training ends in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo.local import TRAIN, LocalStage
from tests.support.trainer.held import allow, held
from tests.support.trainer.launched import until

from holdfast_core.api import Detection, HangsSpec, SparesStatus, changed
from holdfast_core.ids import Worker, is_spare

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("forked_pods"),
]

STEPS = 40
HELD_STEPS = 12
"""Steps after which the ranks wait for the spare. It is one save and more."""
SECONDS = 600.0
"""Longest wait for one event. A busy machine takes minutes to import torch in several processes."""


@pytest.mark.fault("A worker is lost while a spare pod is ready")
def test_a_spare_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    stage = LocalStage(tmp_path, STEPS)
    cluster = stage.run.cluster
    policy = changed(cluster.job.spec.failure_policy, hangs=HangsSpec(detection=Detection.OFF))
    spec = changed(cluster.job.spec, spares=1, failure_policy=policy)
    cluster.job = changed(cluster.job, spec=spec)
    limit = tmp_path / "limit"
    allow(limit, HELD_STEPS)
    script = TRAIN / "train.py"
    at = cluster.command.index(str(script))
    cluster.command = (
        *cluster.command[: at - 1],
        *held(limit, script),
        *cluster.command[at + 1 :],
    )
    expected = stage.reference_digests(lambda text: None)

    def spares() -> SparesStatus:
        assert not stage.run.failed, stage.run.explain()
        return cluster.job.status.spares or SparesStatus()

    try:
        stage.start()
        until(lambda: spares().ready == 1, "a spare that has imported torch", SECONDS)
        [spare] = [p for p in cluster.pods.values() if is_spare(p.spec.worker)]
        assert spare.rank_pids() == []
        assert list(spare.node.rglob("*.shard")) == []
        lost = cluster.member(Worker(1))
        cluster.lose(lost)
        allow(limit, None)
        until(lambda: bool(spares().promoted), "the round that takes the spare", SECONDS)
        [record] = spares().promoted
        assert (record.worker, record.birth, record.pod) == (1, 1, spare.spec.name)
        until(lambda: spare.rank_pids() != [], "ranks in the pod of the spare", SECONDS)
        until(stage.is_complete, "the end of the job", SECONDS)
        assert stage.final_digests() == expected, stage.run.explain()
        assert cluster.member(Worker(1)) == spare.spec.name
        status = cluster.job.status
        assert status.restart_round == 1, stage.run.explain()
        assert status.last_recovery is not None
        assert status.last_recovery.workers == (1,)
    finally:
        stage.close()
