"""ROUND messages and states of a round with defaults, so that a test names only the fields that it checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast_core.ids import RestartRound, Worker
from holdfast_core.messages.schema import Member, Policy, RestorePoint, Round
from holdfast_sidecar.base.rounds import RoundState


def round_message(round_: int = 0, *, workers: int = 2, **fields: Any) -> Round:
    """Return the ROUND of a gang that trains from the beginning and saves every step.

    Worker 0 coordinates and hosts the store. `fields` replace fields of the message.
    """
    message = Round(
        round=RestartRound(round_),
        version=1,
        restore_point=RestorePoint(),
        coordinator=Worker(0),
        store_host=Worker(0),
        workers=workers,
        members=tuple(Member(Worker(w), f"gpt-{w}-r0", f"10.0.0.{w}:1:2") for w in range(workers)),
        copies={},
        policy=Policy(interval_steps=1),
    )
    return replace(message, **fields)


def accepted(message: Round, *, worker: int = 0, procs_per_worker: int = 1) -> RoundState:
    """Return the state of a worker that has accepted this ROUND."""
    return RoundState(
        Worker(worker), procs_per_worker, message.round, f"gpt-{worker}-r0", accepted=message
    )


def first_round() -> RoundState:
    """Return the state of worker 0 of two, whose copies go to worker 1."""
    return accepted(round_message(copies={Worker(0): (Worker(1),)}))
