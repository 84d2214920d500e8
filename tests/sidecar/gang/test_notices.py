"""Levels that ranks are notified of, and the level that a job without an object store does not have."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.ids import JobUid, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    PROTOCOL_VERSION,
    Hello,
    Policy,
    StepOutcome,
)
from holdfast_sidecar.base.pod import CurrentRound
from holdfast_sidecar.gang.state import RankNotices
from holdfast_sidecar.wire.intake import LocalConnection, LocalConnections

ROUND, STEP = RestartRound(0), Step(10)
NO_STORE = Policy(interval_steps=1)
WITH_STORE = {
    "every n steps": Policy(interval_steps=1, object_every_steps=100),
    "every n seconds": Policy(interval_steps=1, object_every_seconds=60),
}


class RankZero:
    """The connection of rank 0, which records what it is sent."""

    def __init__(self) -> None:
        self.hello = Hello(PROTOCOL_VERSION, JobUid("job"), Rank(0))
        self.rank = Rank(0)
        self.pushed: list[Any] = []

    def push(self, message: Any) -> bool:
        self.pushed.append(message)
        return True

    @property
    def outcomes(self) -> list[tuple[Level, str | None]]:
        """The levels of the step, each with the reason why it is not reached."""
        return [(m.level, m.reason or None) for m in self.pushed]


def connected(policy: Policy) -> tuple[RankNotices, RankZero]:
    rank, connections = RankZero(), LocalConnections()
    connections.add(cast("LocalConnection", rank))
    state = CurrentRound(accepted(round_message(policy=policy)))
    return RankNotices(state, connections), rank


def level(level: Level) -> StepOutcome:
    return StepOutcome(STEP, ROUND, level)


def test_a_committed_step_of_a_job_without_a_store_is_never_persisted() -> None:
    notices, rank = connected(NO_STORE)
    notices.level(level(Level.LOCAL))
    notices.level(level(Level.REPLICATED))
    absent = (Level.PERSISTED, NO_OBJECT_TIER)
    assert rank.outcomes == [(Level.LOCAL, None), absent, (Level.REPLICATED, None), absent]
    (failed, _) = [m for m in rank.pushed if isinstance(m, StepOutcome) and m.failed]
    assert "spec.checkpoint.object" in failed.message


def test_a_rank_that_connects_again_is_told_so_again() -> None:
    notices, rank = connected(NO_STORE)
    notices.level(level(Level.LOCAL))
    first = list(rank.pushed)
    notices.repeat(cast("LocalConnection", rank))
    assert rank.pushed == [*first, *first]


@pytest.mark.parametrize("policy", WITH_STORE.values(), ids=WITH_STORE)
def test_a_job_with_a_store_can_persist_every_step(policy: Policy) -> None:
    notices, rank = connected(policy)
    notices.level(level(Level.LOCAL))
    notices.level(level(Level.PERSISTED))
    assert [message.failed for message in rank.pushed] == [False, False]
