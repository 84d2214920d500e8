"""Saves, commits, retries, deletions, sweeps, restores and crashes in any order, request by request.

A model knows which checkpoints were committed and which of them a process has begun to delete. Every other
one must be restorable at any time (I1, I2), and in the end only needed objects may be left (I7).
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB_UID, manifest, shard_header
from tests.support.shards.shard_files import write_shard
from tests.support.tiers.objects import MemoryObjectStore

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import MAX_EARLIER, Earlier, plan_pack
from holdfast_core.store.commit import commit
from holdfast_core.store.rules import most_needed
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.usage import sweep as sweep_orphans
from holdfast_core.store.usage import usage_of
from holdfast_core.tiers.objects import Listed, ObjectSource, ObjectStore, Page

T = TypeVar("T")


class Killed(Exception):
    """The process of this actor is dead and sends no more requests to the store."""


class Actor:
    """A thread whose requests to the store are made one at a time, when `advance` allows it."""

    def __init__(self, inner: ObjectStore, work: Callable[[ObjectStore], object]) -> None:
        """Start the thread. It runs `work` with a store of its own until its first request."""
        self._changed = threading.Condition()
        self._waiting = 0
        self._permits = 0
        self._killed = False
        self._ended = False
        self._work = work
        self.error: BaseException | None = None
        """What `work` raised other than Killed. Complete when the actor has ended."""
        self._thread = threading.Thread(
            target=self._run, args=(_Stopping(inner, self),), daemon=True
        )
        self._thread.start()
        with self._changed:
            self._changed.wait_for(self._stands, HANG_SECONDS)

    @property
    def ended(self) -> bool:
        return self._ended

    def advance(self, requests: int) -> None:
        """Let the actor make at most this many requests, and wait until it stops again."""
        for _ in range(requests):
            with self._changed:
                if self._ended:
                    return
                self._permits = 1
                self._changed.notify_all()
                assert self._changed.wait_for(self._stands, HANG_SECONDS), (
                    "the actor does not go on"
                )

    def finish(self) -> None:
        while not self._ended:
            self.advance(1)
        self._thread.join(HANG_SECONDS)

    def kill(self) -> None:
        """End the actor at the request before which it stands."""
        with self._changed:
            self._killed = True
        self.finish()

    def request(self, call: Callable[[], T]) -> T:
        """Make a request in its turn. Called by the actor's threads."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permits > 0)
            self._permits -= 1
            self._waiting -= 1
            if self._killed:
                self._permits = 1  # every other thread of a dead process ends as well
                raise Killed
        return call()

    def _stands(self) -> bool:
        return self._ended or (self._waiting > 0 and self._permits == 0)

    def _run(self, store: ObjectStore) -> None:
        try:
            self._work(store)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


class _Stopping:
    """ObjectStore of one actor. Each key is deleted by a request of its own."""

    def __init__(self, inner: ObjectStore, actor: Actor) -> None:
        self._inner = inner
        self._request = actor.request
        self.name = inner.name

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._request(lambda: self._inner.write(key, source, replace=replace))

    def get(self, key: str) -> bytes:
        return self._request(lambda: self._inner.get(key))

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        self._request(lambda: self._inner.read_into(key, start, buffer, stopped))

    def size(self, key: str, *, sure: bool = False) -> int | None:
        return self._request(lambda: self._inner.size(key, sure=sure))

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        return self._request(lambda: self._inner.list(prefix, page, folders=folders))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._request(lambda key=key: self._inner.delete([key]))  # type: ignore[misc]

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        return self._request(lambda: self._inner.unfinished(prefix))

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        return self._request(lambda: self._inner.abort_stale(prefixes, older_than))

    def close(self) -> None:
        """Do nothing: the actors of a test share the inner store."""


NAMESPACE, LAYOUT = "team-a", b"{}"
CLONES = "team-b"
"""The jobs that start from a checkpoint of another one."""
CHUNK, CHUNKS = 4096, 10
STEPS = 8


def payload_of(checkpoint: CheckpointId) -> bytes:
    """Return a payload. Of its chunks some never change, some change at every second step, some always."""
    versions = [0] * 4 + [checkpoint.step // 2] * 3 + [100 + checkpoint.step + checkpoint.round] * 3
    seeds = [f"{place}/{version}" for place, version in enumerate(versions)]
    return b"".join(random.Random(seed).randbytes(CHUNK) for seed in seeds)


@dataclass
class Coordinator:
    round: int
    last: CheckpointId | None
    next_step: int
    on_way: set[CheckpointId] = field(default_factory=set)


@dataclass
class Task:
    actor: Actor
    kind: str
    checkpoint: CheckpointId | None = None


class World:
    """The shards of checkpoints on the node, and what ranks and coordinators do with a store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[CheckpointId, DiskShardReader] = {}

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def reader(self, checkpoint: CheckpointId) -> DiskShardReader:
        if checkpoint not in self._readers:
            data = payload_of(checkpoint)
            header = shard_header(
                len(data),
                step=checkpoint.step,
                round=checkpoint.round,
                chunk_bytes=CHUNK,
                world_size=1,
            )
            self._readers[checkpoint] = write_shard(self._folder, header, data)
        return self._readers[checkpoint]

    def uploaded_and_committed(
        self, tier: ObjectTier, own: CheckpointId, base: CheckpointId | None
    ) -> bool:
        """Upload and commit as a rank and its coordinator do. False if the base is gone."""
        reader = self.reader(own)
        record = reader.record
        earlier, allowed = None, set[CheckpointId]()
        if base is not None:
            needs = tier.get_references(NAMESPACE, JOB_UID, base)
            allowed = {base, *most_needed(needs, MAX_EARLIER - 1)}
            try:
                stored = tier.stored(NAMESPACE, self.reader(base).record.ref)
                earlier = Earlier(stored.trailer, stored.index)
            except HoldfastError:
                earlier = None
        index = plan_pack(Trailer(record, reader.table), [], earlier, allowed, base)
        if index is None:
            tier.upload_shard(NAMESPACE, reader)
        else:
            tier.upload_pack(NAMESPACE, reader, index)
        bases = set() if index is None or index.base is None else {index.base}
        needed = {} if index is None else index.earlier()
        tier.put_layout(NAMESPACE, record.ref, LAYOUT)
        return commit(tier, NAMESPACE, manifest([record]), needed, bases)

    def assert_comes_back(
        self, objects: ObjectStore, checkpoint: CheckpointId, namespace: str = NAMESPACE
    ) -> None:
        tier = ObjectTier(objects, readers=1)
        tier.get_manifest(namespace, JOB_UID, checkpoint)
        with tier.open_shard(namespace, self.reader(checkpoint).record.ref) as source:
            runs = [bytes(run) for run in source.read([range(CHUNKS)])]
        assert b"".join(runs) == payload_of(checkpoint)


class Interleavings(RuleBasedStateMachine):
    world: ClassVar[World]

    @initialize()
    def start(self) -> None:
        self.store = MemoryObjectStore(page_keys=3)
        self.tasks: list[Task] = []
        self.committed: set[CheckpointId] = set()
        self.deleting: set[CheckpointId] = set()
        self.cloned: set[CheckpointId] = set()
        self.coordinator = Coordinator(0, None, 0)
        for _ in range(2):
            self.save()
            self.tasks.pop().actor.finish()

    # ------------------------------------------------------------------ what processes do

    @precondition(lambda self: self.running("save") == 0 and self.coordinator.next_step < STEPS)
    @rule()
    def save(self) -> None:
        coordinator = self.coordinator
        own = CheckpointId(Step(coordinator.next_step), RestartRound(coordinator.round))
        coordinator.next_step += 1
        coordinator.on_way.add(own)

        def work(objects: ObjectStore) -> None:
            tier = ObjectTier(objects, readers=1)
            base = coordinator.last
            if not self.world.uploaded_and_committed(tier, own, base):
                assert self.world.uploaded_and_committed(tier, own, None)
            self.committed.add(own)
            coordinator.last = own
            coordinator.on_way.discard(own)

        self.begin("save", work, own)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete any checkpoint, even the newest one, which the next save has as its base."""
        doomed = data.draw(st.sampled_from(self.readable()))
        self.deleting.add(doomed)
        self.begin(
            "delete", lambda o: ObjectTier(o).delete_checkpoint(NAMESPACE, JOB_UID, doomed), doomed
        )

    @precondition(lambda self: self.running("sweep") == 0)
    @rule()
    def sweep(self) -> None:
        coordinator = self.coordinator
        self.begin("sweep", lambda objects: sweep(objects, coordinator))

    @precondition(lambda self: self.running("sweep of the store") == 0)
    @rule(requests=st.integers(0, 80))
    def sweep_the_store(self, requests: int) -> None:
        """Another process, which knows of no upload, lists the whole store and deletes orphans.

        A listing takes many requests, so that few sweeps would reach their end beside a save.
        """
        self.begin("sweep of the store", sweep_everything)
        self.tasks[-1].actor.advance(requests)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def clone(self, data: st.DataObject) -> None:
        """Another job reads a checkpoint, and saves the state under its own prefix."""
        wanted = data.draw(st.sampled_from(self.readable()))

        def work(objects: ObjectStore) -> None:
            try:
                self.world.assert_comes_back(objects, wanted)
            except HoldfastError:
                if wanted not in self.deleting:
                    raise
                return
            tier, reader = ObjectTier(objects, readers=1), self.world.reader(wanted)
            tier.upload_shard(CLONES, reader)
            tier.put_layout(CLONES, reader.record.ref, LAYOUT)
            assert commit(tier, CLONES, manifest([reader.record]), {}, ())
            self.cloned.add(wanted)

        self.begin("clone", work, wanted)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(self.readable()))

        def work(objects: ObjectStore) -> None:
            try:
                self.world.assert_comes_back(objects, wanted)
            except HoldfastError:
                if wanted not in self.deleting:
                    raise

        self.begin("restore", work, wanted)

    @precondition(lambda self: self.tasks)
    @rule(number=st.integers(0, 5), requests=st.integers(1, 6))
    def advance(self, number: int, requests: int) -> None:
        task = self.tasks[number % len(self.tasks)]
        task.actor.advance(requests)
        if task.actor.ended:
            self.tasks.remove(task)
            self.assert_no_error(task)

    @rule(deletions_die=st.booleans())
    def crash(self, deletions_die: bool) -> None:
        """The coordinator dies. The deletions die with it, or those it has sent are carried out later."""
        dying = ["save", "sweep", "sweep of the store"] + ["delete"] * deletions_die
        for task in [t for t in self.tasks if t.kind in dying]:
            task.actor.kill()
            self.assert_no_error(task)
            self.tasks.remove(task)
        exists = ObjectTier(self.store).list_manifests(NAMESPACE, JOB_UID)
        self.committed |= set(exists)
        step = self.coordinator.next_step
        newest = max((c for c in exists if c not in self.deleting), default=None)
        self.coordinator = Coordinator(self.coordinator.round + 1, newest, max(0, step - 1))

    def teardown(self) -> None:
        for task in getattr(self, "tasks", ()):
            task.actor.finish()
            self.assert_no_error(task)
        for checkpoint in self.readable():
            self.world.assert_comes_back(self.store, checkpoint)
        for checkpoint in self.cloned:
            self.world.assert_comes_back(self.store, checkpoint, CLONES)
        self.assert_nothing_is_left_over()

    # ------------------------------------------------------------------ what must hold

    def assert_no_error(self, task: Task) -> None:
        if task.actor.error is not None:
            raise AssertionError(f"{task.kind} of {task.checkpoint}") from task.actor.error

    def assert_nothing_is_left_over(self) -> None:
        """Delete all checkpoints but the newest one. Only what that one needs may stay."""
        tier = ObjectTier(self.store)
        exists = tier.list_manifests(NAMESPACE, JOB_UID)
        for checkpoint in exists[:-1]:
            tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint)
        if self.store.objects and self.coordinator.round % 2:
            sweep_everything(self.store, ended=(JOB_UID,))
            sweep_everything(self.store, ended=(JOB_UID,))
        else:
            last = Coordinator(self.coordinator.round + 1, None, 0)
            for _ in range(2):
                sweep(self.store, last)
        kept = set(exists[-1:])
        for checkpoint in exists[-1:]:
            kept |= tier.get_references(NAMESPACE, JOB_UID, checkpoint).keys()
            self.world.assert_comes_back(self.store, checkpoint)
        folders = {f"s{c.step:012d}-r{c.round:06d}" for c in kept}
        ours = [key for key in self.store.objects if key.startswith(f"{NAMESPACE}/")]
        assert {key.split("/")[3] for key in ours if "/shards/" in key} <= folders
        orphans = usage_of(ObjectTier(self.store), timedelta(0)).orphans
        assert not any(total.objects for total in orphans.values())

    # ------------------------------------------------------------------ helpers

    def begin(
        self, kind: str, work: Callable[[ObjectStore], object], own: CheckpointId | None = None
    ) -> None:
        self.tasks.append(Task(Actor(self.store, work), kind, own))

    def running(self, kind: str) -> int:
        return sum(task.kind == kind for task in self.tasks)

    def readable(self) -> list[CheckpointId]:
        return sorted(self.committed - self.deleting)


def sweep(objects: ObjectStore, coordinator: Coordinator) -> None:
    ObjectTier(objects).sweep(
        NAMESPACE,
        JOB_UID,
        RestartRound(coordinator.round),
        timedelta(0),
        lambda: frozenset(coordinator.on_way),
    )


def sweep_everything(objects: ObjectStore, ended: Collection[JobUid] = ()) -> None:
    """List and sweep as the command of the pod does, without a grace: the order alone must protect."""
    tier = ObjectTier(objects, readers=1)
    sweep_orphans(tier, usage_of(tier, timedelta(0)), timedelta(0), ended=ended)


@pytest.mark.fault("A process is killed while it deletes a checkpoint")
class TestInterleavings(Interleavings.TestCase):
    settings = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    @classmethod
    def setUpClass(cls) -> None:
        cls.temporary = tempfile.TemporaryDirectory()
        Interleavings.world = World(Path(cls.temporary.name))

    @classmethod
    def tearDownClass(cls) -> None:
        Interleavings.world.close()
        cls.temporary.cleanup()


@pytest.mark.fault(
    "Two processes delete a base and what it needs while a third one commits on top of them"
)
@pytest.mark.fault("A coordinator dies at any request of a commit or a sweep")
def test_two_deletions_and_a_commit_stop_at_any_request(tmp_path: Path) -> None:
    """NEXT needs objects of FIRST by way of BASE. Both are deleted while NEXT is committed.

    The marker of NEXT is listed before that of BASE, and each page of a listing has one name.
    """
    first, base, last = (
        CheckpointId(Step(step), RestartRound(round_)) for step, round_ in ((2, 0), (5, 0), (4, 1))
    )
    world = World(tmp_path)
    for of_base in range(8):
        for of_first in range(8):
            store = MemoryObjectStore(page_keys=1)
            assert world.uploaded_and_committed(ObjectTier(store), first, None)
            assert world.uploaded_and_committed(ObjectTier(store), base, first)
            deleters = [
                Actor(
                    store,
                    lambda objects, doomed=doomed: ObjectTier(objects).delete_checkpoint(
                        NAMESPACE, JOB_UID, doomed
                    ),
                )
                for doomed in (base, first)
            ]
            deleters[0].advance(of_base)
            deleters[1].advance(of_first)
            try:
                committed = world.uploaded_and_committed(ObjectTier(store), last, base)
            except HoldfastError:
                committed = False  # its base was gone before it began
            for deleter in deleters:
                deleter.finish()
                assert deleter.error is None
            if committed:
                world.assert_comes_back(store, last)
    world.close()


@pytest.mark.fault("A marker of a reference replaces another one while a sweep lists them")
def test_a_sweep_lists_markers_while_one_replaces_another(tmp_path: Path) -> None:
    """FIRST is needed by BASE, then by NEXT. A stale marker of an upload that died lies between the two.

    A listing of one name a page may pass the place of NEXT before its marker is put, and that of BASE after
    its marker was deleted.
    """
    first, base, stale, last = (
        CheckpointId(Step(step), RestartRound(round_))
        for step, round_ in ((2, 0), (5, 0), (4, 2), (4, 1))
    )
    world = World(tmp_path)
    for requests in range(25):
        store = MemoryObjectStore(page_keys=1)
        tier = ObjectTier(store)
        assert world.uploaded_and_committed(tier, first, None)
        assert world.uploaded_and_committed(tier, base, first)
        tier.delete_checkpoint(NAMESPACE, JOB_UID, first)
        tier.put_references(NAMESPACE, JOB_UID, stale, {first: 1})
        store.delete([key for key in store.objects if "-r000002/needs-" in key])
        sweeper = Actor(
            store,
            lambda objects: ObjectTier(objects).sweep(
                NAMESPACE, JOB_UID, RestartRound(3), timedelta(0), lambda: {last}
            ),
        )
        sweeper.advance(requests)
        assert world.uploaded_and_committed(tier, last, base)
        tier.delete_checkpoint(NAMESPACE, JOB_UID, base)
        sweeper.finish()
        assert sweeper.error is None
        world.assert_comes_back(store, last)
    world.close()


@pytest.mark.fault("A whole store is swept while a process uploads that the sweep does not know of")
def test_a_sweep_of_the_store_and_a_save_stop_at_any_request(tmp_path: Path) -> None:
    """LAST needs objects of BASE, in the newest round that has a manifest. No grace protects it."""
    base, last = (CheckpointId(Step(step), RestartRound(1)) for step in (2, 3))
    world = World(tmp_path)
    for of_save in range(16):
        for of_sweep in range(0, 24, 2):
            store = MemoryObjectStore(page_keys=3)
            assert world.uploaded_and_committed(ObjectTier(store), base, None)
            saver = Actor(
                store,
                lambda objects: world.uploaded_and_committed(
                    ObjectTier(objects, readers=1), last, base
                ),
            )
            sweeper = Actor(store, sweep_everything)
            sweeper.advance(of_sweep)
            saver.advance(of_save)
            sweeper.finish()
            saver.finish()
            assert (sweeper.error, saver.error) == (None, None)
            world.assert_comes_back(store, last)
            world.assert_comes_back(store, base)
    world.close()
