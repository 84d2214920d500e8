"""Nodes whose sidecars the operator calls although they answered lately, because one of them may be lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from tests.support.operator.builders import job, pod, status

from holdfast_core.api import changed
from holdfast_core.clock import SystemClock
from holdfast_core.ids import Rank, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank
from holdfast_operator.loop.observe import Observer
from holdfast_operator.model.job import PodPhase, PodView

NODES = frozenset({"node-0", "node-1"})
DEAD = (DeadRank(Rank(1), Worker(1), -6, "connection closed by peer"),)


class Leases:
    """Leases that are all renewed in time."""

    def stale_seconds(self, node: str, now: float, contact: float | None, since: float) -> float:
        return 0.0

    def found(self, node: str) -> None:
        pass


class Watch:
    last_contact = 0.0
    contact_since = 0.0


class Nodes:
    """Nodes that all exist, and that have no conditions."""

    def is_there(self, node: str) -> bool:
        return True

    def get(self, name: str) -> None:
        return None


class Cache:
    leases = Leases()
    nodes = Nodes()
    lease_watch = Watch()


@dataclass
class Calls:
    state: CoordinatorState

    def coordinator_state(self, uid: str) -> CoordinatorState:
        return self.state


def suspects(pods: tuple[PodView, ...], state_round: int = 1) -> frozenset[str]:
    """Return the suspect nodes of a gang of two in round 1 whose coordinator reports a dead rank."""
    state = CoordinatorState(version=1, round=RestartRound(state_round), dead=DEAD)
    observer = Observer(
        cast(Any, Cache()), cast(Any, Calls(state)), cast(Any, None), cast(Any, None), SystemClock()
    )
    gang = changed(job(2), status=status(1, members=(0, 0)))
    return observer.suspects(gang, pods)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        pytest.param({}, NODES, id="its pod trains: its node may be lost"),
        pytest.param({"phase": PodPhase.FAILED}, NODES, id="its pod failed by itself"),
        pytest.param({"terminating": True}, frozenset(), id="its pod is being deleted"),
        pytest.param(None, frozenset(), id="its pod is gone"),
        pytest.param(
            {"birth_round": RestartRound(1)}, frozenset(), id="its pod is of another round"
        ),
    ],
)
def test_dead_ranks_make_all_nodes_suspect_unless_a_lost_pod_explains_them(
    second: dict[str, Any] | None, found: frozenset[str]
) -> None:
    pods = [replace(pod(0), node="node-0")]
    if second is not None:
        pods.append(replace(pod(1), node="node-1", **second))
    assert suspects(tuple(pods)) == found


def test_dead_ranks_of_an_older_round_make_no_node_suspect() -> None:
    pods = (replace(pod(0), node="node-0"), replace(pod(1), node="node-1"))
    assert suspects(pods, state_round=0) == frozenset()
