"""When the ranks of a pod may be forked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.ids import RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    Member,
    Policy,
    RestorePoint,
    Round,
    Run,
    StoreAddress,
)
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.gang.barrier import Facts, open_barrier

POLICY = Policy(interval_steps=10)
POINT = RestorePoint(Step(40), RestartRound(1))
STORE = StoreAddress(RestartRound(2), 29500, "secret", "10.0.0.1")


def message(*addresses: str) -> Round:
    """Return the ROUND of round 2 with members at these addresses."""
    members = tuple(Member(Worker(w), f"p{w}", a) for w, a in enumerate(addresses))
    return round_message(2, restore_point=POINT, members=members, policy=POLICY)


def facts(**fields: object) -> Facts:
    state = accepted(message("10.0.0.1", "10.0.0.2"), worker=1, procs_per_worker=4)
    ready = Facts(
        state,
        restored=True,
        store_address=STORE,
        launcher_connected=True,
        running_round=None,
        last_round=RestartRound(1),
    )
    return replace(ready, **fields)  # type: ignore[arg-type]


def test_the_barrier_opens_when_everything_is_ready() -> None:
    assert open_barrier(facts()) == Run(
        round=RestartRound(2),
        restore_point=POINT,
        world_size=8,
        group_rank=Worker(1),
        store=STORE,
        policy=POLICY,
    )


SEALED = RoundState(Worker(1), 4, RestartRound(2), "gpt-1-r0")


def accepting(round_: Round) -> RoundState:
    return SEALED.accepting(round_, round_.content_digest())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"state": SEALED}, "no ROUND", id="sealed"),
        pytest.param({"restored": False}, "restore point", id="not restored"),
        pytest.param(
            {"state": accepting(message("10.0.0.1", ""))}, "address: [1]", id="no address"
        ),
        pytest.param(
            {"state": accepting(message("10.0.0.1"))},
            "not all workers are members",
            id="too few",
        ),
        pytest.param({"store_address": None}, "address of the gang's store", id="no rendezvous"),
        pytest.param({"launcher_connected": False}, "not connected", id="no launcher"),
        pytest.param({"running_round": RestartRound(1)}, "still run", id="old ranks"),
        pytest.param({"last_round": RestartRound(2)}, "ran round 2 already", id="ran already"),
    ],
)
def test_the_barrier_is_closed_until_everything_is_ready(
    fields: dict[str, object], text: str
) -> None:
    reason = open_barrier(facts(**fields))
    assert isinstance(reason, str)
    assert text in reason
