"""Whole lives of one job: the in-memory cluster with one operator process."""

from __future__ import annotations

import asyncio
import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Self, TypeVar

from tests.support.operator.builders import raw_job
from tests.support.operator.fake_cluster import FakeCluster, FakeNode
from tests.support.operator.oracle import broken_rules
from tests.support.operator.simulated_operator import SimulatedOperator

from holdfast_core.api import ApiModel, JobCondition, TrainingJob, TrainingJobStatus
from holdfast_core.ids import Rank, Worker
from holdfast_core.messages.schema import DeadRank
from holdfast_operator.model.reasons import Reason

WORKERS = 4


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all lives, which have nothing in it when `run` returns.

    A loop of its own for each call of `run` would start a thread for the certificates each time.
    """
    return asyncio.new_event_loop()


class _Pickler(pickle.Pickler):
    """Pickler that leaves out functions, frozen values and one further object, and collects them."""

    def __init__(self, file: io.BytesIO, *shared: object) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[object] = list(shared)
        self._places = {id(one): place for place, one in enumerate(shared)}

    def persistent_id(self, one: Any) -> int | None:
        if id(one) not in self._places and not _is_frozen(type(one)):
            return None
        place = self._places.setdefault(id(one), len(self.shared))
        if place == len(self.shared):
            self.shared.append(one)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> object:
        return self._shared[place]


_frozen: dict[type[Any], bool] = {}
"""What `_is_frozen` has found: a life has many objects of few types."""


def _is_frozen(kind: type[Any]) -> bool:
    """Return whether objects of this type never change. Those of the API are frozen models."""
    if kind not in _frozen:
        settings = getattr(kind, "__dataclass_params__", None)
        is_value = issubclass(kind, ApiModel | FunctionType)
        _frozen[kind] = is_value or (settings is not None and settings.frozen)
    return _frozen[kind]


class Life:
    """One job on the in-memory cluster. `restart` replaces the operator process."""

    def __init__(
        self,
        *,
        copies: int = 1,
        store: bool = False,
        every: int = 1000,
        total_steps: int = 100_000,
        spares: int = 0,
        tolerations: Sequence[Mapping[str, str]] = (),
    ) -> None:
        checkpoint: dict[str, object] = {"interval": {"steps": 5}, "peer": {"copies": copies}}
        if store:
            checkpoint["object"] = {"storeRef": {"name": "main"}, "every": {"steps": every}}
        nodes = {f"node-{i}": FakeNode(f"node-{i}") for i in range(WORKERS + 2)}
        job = raw_job(WORKERS, checkpoint=checkpoint)
        job["spec"]["spares"] = spares
        job["spec"]["template"]["spec"]["tolerations"] = list(tolerations)
        self.cluster = FakeCluster(job=job, nodes=nodes, total_steps=total_steps)
        self.copies = copies
        self.restart()

    def restart(self) -> None:
        self.operator = SimulatedOperator(self.cluster)

    def copy(self) -> Self:
        """Return a life that goes on from here by itself, with the same memory of the operator.

        What cannot change, and the counters of the metrics, are shared. The rest is copied by pickle, which
        takes a fifth of the time of `copy.deepcopy`.
        """
        written = io.BytesIO()
        pickler = _Pickler(written, self.operator.metrics)
        pickler.dump(self)
        written.seek(0)
        copied: Self = _Unpickler(written, pickler.shared).load()
        return copied

    def run(
        self,
        seconds: int,
        until: Callable[[TrainingJobStatus], bool] | None = None,
        *,
        each_second: bool = False,
    ) -> None:
        """Run the cluster, and the passes that are due or one each second, until the status is as wanted."""

        async def passes() -> None:
            for _ in range(seconds):
                if each_second:
                    await self.operator.run_pass()
                else:
                    await self.operator.run_due_pass()
                self.cluster.tick()
                if until is not None and until(self.status):
                    return

        _loop().run_until_complete(passes())

    def trained(self, seconds: int = 40) -> Self:
        """Run the new job, which trains after this time, and return the life."""
        self.run(seconds)
        assert self.status.is_true(JobCondition.RUNNING)
        return self

    def run_until_committed(self, *, is_stored: bool = False) -> None:
        """Run until no pod has a shard whose step is not committed.

        A failure would interrupt its commit, and the operator would finish it.

        Args:
            is_stored: The newest commit must be in the object store, too.
        """
        stored = self.cluster.gang.store.checkpoints

        def is_committed() -> bool:
            if any(s.inventory().uncommitted for s in self.cluster.sidecars.values()):
                return False
            return not is_stored or self.cluster.newest_commit() in stored

        if not is_committed():
            self.run(10, lambda _: is_committed())

    def run_tenths(self, tenths: int) -> None:
        """Run passes every tenth of a second, in which nothing in the cluster changes."""

        async def passes() -> None:
            for _ in range(tenths):
                await self.operator.run_pass()
                self.cluster.seconds += 0.1

        _loop().run_until_complete(passes())

    @property
    def status(self) -> TrainingJobStatus:
        return TrainingJob.from_dict(self.cluster.job).status

    def pod(self, worker: int) -> str:
        pod = self.operator.worker_pod(worker)
        assert pod is not None
        return pod.name

    def rank_dies(self) -> None:
        run = self.cluster.gang.run
        assert run is not None
        run.dead = (DeadRank(Rank(1), Worker(1), 1, "boom"),)
        run.version += 1

    def silence(self, *workers: int) -> None:
        """Stop the sidecars of these workers, or all sidecars, from answering the operator."""
        if workers:
            self.cluster.silent_workers = set(workers)
        else:
            self.cluster.all_silent = True

    def end_silence(self) -> None:
        self.cluster.all_silent = False
        self.cluster.silent_workers = set()

    def change_spec(self, **fields: object) -> None:
        """Change fields of the job's spec as a user's patch would."""
        self.cluster.change_spec(**fields)

    def newest(self) -> int:
        found = self.cluster.newest_commit()
        assert found is not None
        return found.step

    def nothing_was_deleted(self) -> bool:
        return self.cluster.deletions == []

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Return value, reason and message of a condition."""
        found = self.status.condition(kind)
        assert found is not None, kind
        return found.status, found.reason, found.message

    def restored_steps(self) -> list[int | None]:
        """Return the steps of all restore points but that of the first round."""
        return [c.status["restorePoint"].get("step") for c in self.cluster.choices[1:]]

    def node_of(self, worker: int) -> FakeNode:
        pod = self.operator.worker_pod(worker)
        assert pod is not None and pod.node is not None
        return self.cluster.nodes[pod.node]

    def lose_all_pods(self) -> None:
        for name in list(self.cluster.pods):
            self.cluster.lose_pod(name)

    def recovers_from(self, step: int) -> None:
        """Assert that the next restore point is this step and that training runs again."""
        before = len(self.cluster.choices)
        self.run(120)
        assert self.status.is_true("Running")
        assert len(self.cluster.choices) > before
        point = self.cluster.choices[before].status["restorePoint"]
        assert point.get("step") == step
        assert broken_rules(self.cluster, self.copies) == []


class Killed(BaseException):
    """Stands for the end of the process. It is a BaseException, so that no handler of the operator runs."""


def dies_within(life: Life, writes: int, *, seconds: int) -> bool:
    """Run passes up to and including that write. Return False if the operator writes less in this time."""
    last = len(life.cluster.api.requests) + writes

    def end() -> None:
        if len(life.cluster.api.requests) >= last:
            raise Killed

    life.operator.on_write(end)
    try:
        life.run(seconds)
    except Killed:
        return True
    return False


def dies_after(life: Life, writes: int) -> None:
    """Run passes of the operator up to and including that write, which it must make within a minute."""
    assert dies_within(life, writes, seconds=60)


def begun(status: TrainingJobStatus) -> bool:
    return status.restart_round == 1


def chosen(status: TrainingJobStatus) -> bool:
    return begun(status) and status.restore_point is not None


def runs(status: TrainingJobStatus) -> bool:
    return status.is_true(JobCondition.RUNNING)


L = TypeVar("L", bound=Life)


def after_each_death(begun: L, *, seconds: int) -> Iterator[L]:
    """Yield copies of a life: in each, the operator has died after a further write and is replaced.

    The last one is that of an operator that writes no more in this time.
    """
    for writes in range(1, 60):
        life = begun.copy()
        died = dies_within(life, writes, seconds=seconds)
        life.restart()
        yield life
        if not died:
            return
    raise AssertionError("the operator makes more writes than were tried")


def trains_with(workers: int) -> Callable[[TrainingJobStatus], bool]:
    """Return whether a gang of this size trains and does not stop for another size."""

    def reached(status: TrainingJobStatus) -> bool:
        known = status.condition(JobCondition.RESIZING)
        over = known is None or known.reason != Reason.STOPPING
        return len(status.members) == workers and status.is_true(JobCondition.RUNNING) and over

    return reached
