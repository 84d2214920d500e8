"""Saves, restores, prunes, pins, clones and roll backs of one job in any order, on clocks that jump.

A prune is two steps, as in the operator: a checkpoint is marked by a plan, and deleted in a later pass unless
something needs it by then. Another job chooses only what is not marked. After every step of the machine, all
that a restore, a clone or a pin needs is there (I1).
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.clock import ManualClock
from tests.support.operator.builders import checkpoint as checkpoint_object
from tests.support.operator.builders import job, manifest_digest, status

from holdfast_core.api import (
    Checkpoint,
    CheckpointPhase,
    Gang,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    changed,
    on_lineage,
)
from holdfast_core.api.checkpoint_policy import KeepBestSpec, KeepEverySpec
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.retention import BestMode
from holdfast_core.store_retention import is_stored, needed_in_store, plan_store

METRICS = st.dictionaries(st.sampled_from(["loss", "other"]), st.floats(), max_size=2)
HOURS = st.integers(-200, 400)
RETENTIONS = st.fixed_dictionaries(
    {"keep_last": st.integers(2, 4)},
    optional={
        "keep_every": st.sampled_from([KeepEverySpec(steps=30), KeepEverySpec(duration="6h")]),
        "keep_for": st.sampled_from(["1h", "48h"]),
        "hourly": st.integers(0, 3),
        "daily": st.integers(0, 3),
        "keep_best": st.sampled_from(
            [KeepBestSpec(metric="loss", mode=mode, count=2) for mode in BestMode]
        ),
    },
)


class Store(RuleBasedStateMachine):
    """One job, its Checkpoint objects, and other jobs that start from them."""

    @initialize(retention=RETENTIONS)
    def start(self, retention: dict[str, object]) -> None:
        self.clock = ManualClock()
        self.jumped = timedelta(0)
        self.job: Gang = job(2, status(0, (0, 0)), store="main", retention=retention)
        self.objects: dict[CheckpointId, Checkpoint] = {}
        self.clones: dict[int, str] = {}
        """Number of each other job that has no checkpoint of its own yet, and what it starts from."""
        self.round, self.step, self.cloned = 0, 0, 0

    # ------------------------------------------------------------------ the job

    @rule(steps=st.lists(st.integers(1, 40), min_size=1, max_size=4), metrics=METRICS)
    def save(self, steps: list[int], metrics: dict[str, float]) -> None:
        for trained in steps:
            self.step += trained
            id_ = CheckpointId(Step(self.step), RestartRound(self.round))
            at = self.clock.utc_now() + self.jumped
            item = checkpoint_object(id_.step, id_.round, metrics=metrics, committed_at=at)
            self.objects[id_] = item
        last = PersistedStep(
            step=id_.step, round=id_.round, manifest=manifest_digest(id_.step, id_.round)
        )
        self._change(last_persisted=last)

    @rule(data=st.data())
    @precondition(lambda self: self._restorable())
    def restore(self, data: st.DataObject) -> None:
        """Begin a round from any checkpoint on the lineage, as a restart or a roll back does."""
        base = data.draw(st.sampled_from(self._restorable()))
        self.round, self.step = self.round + 1, base.step
        point = RestorePointStatus(step=base.step, round=base.round)
        last = PersistedStep(
            step=base.step, round=base.round, manifest=manifest_digest(base.step, base.round)
        )
        entry = LineageEntry(round=RestartRound(self.round), base=base)
        lineage = (*self.job.status.lineage, entry)
        self._change(
            restore_point=point,
            lineage=lineage,
            last_persisted=last,
            restart_round=RestartRound(self.round),
        )

    # ------------------------------------------------------------------ people and other jobs

    @rule(data=st.data(), pin=st.booleans())
    @precondition(lambda self: self._stored())
    def pin(self, data: st.DataObject, pin: bool) -> None:
        item = self.objects[data.draw(st.sampled_from(self._stored()))]
        assert item.id is not None
        self.objects[item.id] = changed(item, spec=changed(item.spec, pin=pin))

    @rule(data=st.data())
    @precondition(lambda self: self._stored())
    def clone(self, data: st.DataObject) -> None:
        source = self.objects[data.draw(st.sampled_from(self._stored()))]
        self.cloned += 1
        self.clones[self.cloned] = source.name

    @rule(data=st.data())
    @precondition(lambda self: self.clones)
    def clone_has_its_own(self, data: st.DataObject) -> None:
        del self.clones[data.draw(st.sampled_from(sorted(self.clones)))]

    @rule(hours=HOURS)
    def clock_jumps(self, hours: int) -> None:
        self.jumped += timedelta(hours=hours)

    # ------------------------------------------------------------------ the operator

    @rule()
    def mark(self) -> None:
        """Carry out the plan: mark what it prunes."""
        now = self.clock.utc_now() + self.jumped
        plan = plan_store(self.job, self.objects.values(), self._sources(), now)
        for verdict in plan.prune:
            item = self.objects[verdict.checkpoint]
            marked = changed(item.status, phase=CheckpointPhase.DELETING)
            self.objects[verdict.checkpoint] = changed(item, status=marked)

    @rule()
    def delete(self) -> None:
        """Delete the marked checkpoints that nothing needs."""
        needed = needed_in_store(self.job, self.objects.values(), self._sources())
        for marked in self._marked():
            if not any(marked in found for found in needed.values()):
                del self.objects[marked]

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def what_is_needed_is_there(self) -> None:
        if not hasattr(self, "job"):
            return
        names = {c.name for c in self.objects.values()}
        assert self._sources() <= names
        now = self.job.status
        for needed in (now.last_persisted, now.restore_point):
            assert needed is None or needed.id in self.objects

    # ------------------------------------------------------------------ parts

    def _change(self, **changes: object) -> None:
        state = changed(self.job.status, **changes)
        self.job = self.job.model_copy(update={"status": state})

    def _stored(self) -> list[CheckpointId]:
        return [id_ for id_, c in self.objects.items() if is_stored(c)]

    def _marked(self) -> list[CheckpointId]:
        deleting = CheckpointPhase.DELETING
        return [id_ for id_, c in self.objects.items() if c.status.phase is deleting]

    def _restorable(self) -> list[CheckpointId]:
        lineage = self.job.status.lineage
        return [id_ for id_ in self._stored() if on_lineage(id_, lineage)]

    def _sources(self) -> set[str]:
        return set(self.clones.values())


@pytest.mark.fault("A checkpoint is pruned while another job chooses it to start from")
def test_no_order_prunes_what_is_needed() -> None:
    given = settings(max_examples=100, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Store, settings=given)
