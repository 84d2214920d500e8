"""The operator is absent until every leaf certificate of a running gang has expired.

All handshakes are real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests.support.sidecar import until
from tests.support.sidecar.gang import Gangs

from holdfast_core.clock import SystemClock
from holdfast_core.ids import Level, RestartRound, Worker
from holdfast_core.messages.schema import RestorePoint
from holdfast_operator.model.job import PodPhase, PodView, Reachable, SidecarView
from holdfast_operator.model.keys import job_key
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates
from holdfast_operator.sidecars.client import SidecarClient

pytestmark = pytest.mark.integration


class OperatorNamespace:
    """Holds the Secret with the job's authority, which is all that an operator has after its restart."""

    def __init__(self, gang: Any) -> None:
        self._data = {
            "ca.crt": gang.authority.certificate_pem.decode(),
            "ca.key": gang.authority.key_pem.decode(),
        }

    async def get_secret(self, namespace: str, name: str) -> dict[str, str]:
        return self._data


@asynccontextmanager
async def operator_of(gang: Any, worker: int) -> AsyncIterator[tuple[Sidecars, PodView]]:
    """Return the real operator's connection to one sidecar, as after a start of the operator."""
    member = gang.operator.members[worker]
    host, port, _ = member.address.split(":")
    client = SidecarClient(int(port))
    await client.start()
    clock = SystemClock()
    certificates = Certificates(OperatorNamespace(gang), "holdfast-system", clock)  # type: ignore[arg-type]
    sidecars = Sidecars(client, certificates, clock, lambda key: None, lambda part: None)
    pod = PodView(
        name=member.pod,
        uid=f"uid-{worker}",
        worker=Worker(worker),
        birth_round=RestartRound(0),
        phase=PodPhase.RUNNING,
        ip=host,
        node=f"node-{worker}",
        sidecar_started=True,
    )
    try:
        yield sidecars, pod
    finally:
        await sidecars.close()
        await client.close()


async def seal(gang: Any, worker: int, round_: int) -> SidecarView:
    uid = gang.operator.job_uid
    async with operator_of(gang, worker) as (sidecars, pod):
        sidecars.follow(
            job_key("team-a", "gpt"),
            uid,
            None,
            (pod,),
            None,
            frozenset(),
            ranks=2,
            gang=frozenset(),
        )

        def view() -> SidecarView:
            return sidecars.views(uid)[0]

        await until(lambda: view().reachable is not Reachable.UNKNOWN, "first contact")
        assert view().reachable is Reachable.YES
        sidecars.seal(uid, pod.uid, RestartRound(round_))
        await until(lambda: view().sealed_round == round_, "sealed")
        return view()


async def test_a_job_outlives_an_operator_that_is_away_until_all_leaves_have_expired(
    gangs: Gangs,
) -> None:
    async with gangs(2) as gang:
        gang.leaf_lifetime = timedelta(hours=-9)
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        # The only leaf of a sidecar that restarts meanwhile is the expired one in its mount.
        gang.sidecars[1].kill()
        await gang.relaunch(1)
        await gang.operator.round_all(gang.operator.message(0, version=2, copies=gang.copies))
        await gang.connect_rank(1, 0)
        gang.launchers[1].close()
        await gang.launcher(1, running=0, last_round=0)
        saved = await gang.commit(2, Level.REPLICATED)
        point = await gang.point(2)

        # The operator is back. The new pod starts with a fresh leaf, and the operator renews that of its
        # peer.
        await seal(gang, 0, 1)
        gang.lose(1)
        gang.leaf_lifetime = timedelta(hours=1)
        await gang.launch(1, birth_round=1)
        await seal(gang, 1, 1)
        await gang.begin(1, restore=point)
        assert await gang.restored() == saved
        await gang.commit(3, Level.REPLICATED)


async def test_a_renewed_leaf_is_in_force_though_the_node_volume_does_not_take_it(
    gangs: Gangs,
) -> None:
    async with gangs(1) as gang:
        gang.leaf_lifetime = timedelta(hours=-9)
        await gang.launch(0)
        (gang.sidecars[0].node / "certificate.tmp").mkdir()
        view = await seal(gang, 0, 1)
        assert view.inventory is not None
        await gang.operator.round(0, gang.operator.message(1, restore=RestorePoint()))
