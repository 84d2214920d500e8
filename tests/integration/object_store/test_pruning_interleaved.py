"""A commit refers to an earlier checkpoint while another process deletes that checkpoint.

The requests of the two are interleaved in any order, and either may be killed at any request. Existing
checkpoints must stay restorable, and objects that no checkpoint needs must be deleted.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import JOB_UID, manifest, payload, shard_header
from tests.support.shards.shard_files import CopyWriters, write_shard

from holdfast_core.errors import NotFoundError
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.shard_file import DiskShardReader
from holdfast_core.shards.file import Trailer
from holdfast_core.shards.pack import Earlier, plan_pack
from holdfast_core.store.commit import commit
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tiers.objects import Listed, ObjectSource, ObjectStore, Page

pytestmark = pytest.mark.integration
T = TypeVar("T")
NAMESPACE = "team-a"
CHUNK = 4096
FIRST, BASE, NEXT, LAST = (CheckpointId(Step(step), RestartRound(0)) for step in (10, 20, 30, 40))
_turn = threading.Condition()


class Killed(Exception):
    """The process is dead and sends no more requests to the store."""


@dataclass
class Turns:
    """The order of requests to the store. The turns of a process that has ended are skipped.

    After the schedule is exhausted, the order is free.
    """

    schedule: list[str]
    ended: set[str] = field(default_factory=set)

    def take(self, who: str) -> None:
        with _turn:
            while not self._may(who):
                _turn.wait(HANG_SECONDS)

    def _may(self, who: str) -> bool:
        while self.schedule and self.schedule[0] in self.ended:
            self.schedule.pop(0)
        if self.schedule and self.schedule[0] != who:
            return False
        if self.schedule:
            self.schedule.pop(0)
        return True

    def end(self, who: str) -> None:
        with _turn:
            self.ended.add(who)
            _turn.notify_all()


class TurnTaker:
    """ObjectStore of one process. Each call waits for its turn; after `lives` calls the process is dead.

    Each key is deleted with a separate call, so that another process can act between two deletes.
    """

    def __init__(self, inner: ObjectStore, who: str, turns: Turns, lives: int = 10_000) -> None:
        self._inner = inner
        self._who = who
        self._turns = turns
        self._lives = lives
        self._counting = threading.Lock()
        self.name = inner.name

    def _turn(self, call: Callable[[], T]) -> T:
        self._turns.take(self._who)
        try:
            with self._counting:
                self._lives -= 1
                if self._lives < 0:
                    raise Killed
            return call()
        finally:
            with _turn:
                _turn.notify_all()

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        self._turn(lambda: self._inner.write(key, source, replace=replace))

    def get(self, key: str) -> bytes:
        return self._turn(lambda: self._inner.get(key))

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        self._turn(lambda: self._inner.read_into(key, start, buffer, stopped))

    def size(self, key: str, *, sure: bool = False) -> int | None:
        return self._turn(lambda: self._inner.size(key, sure=sure))

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        return self._turn(lambda: self._inner.list(prefix, page, folders=folders))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._turn(lambda key=key: self._inner.delete([key]))  # type: ignore[misc]

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        return self._turn(lambda: self._inner.unfinished(prefix))

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        return self._turn(lambda: self._inner.abort_stale(prefixes, older_than))

    def close(self) -> None:
        """Do nothing: the processes of a test share the inner store."""


@pytest.fixture(scope="module")
def readers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[CheckpointId, DiskShardReader]]:
    """Return shards of one rank with 20 chunks.

    BASE shares all but two with FIRST, and NEXT shares all but one with BASE.
    """
    directory = tmp_path_factory.mktemp("shards")
    first = payload(20 * CHUNK)
    base = payload(2 * CHUNK, seed=1) + first[2 * CHUNK :]
    after = base[: 19 * CHUNK] + payload(CHUNK, seed=2)
    found = {}
    for checkpoint, data in ((FIRST, first), (BASE, base), (NEXT, after), (LAST, after)):
        header = shard_header(len(data), step=checkpoint.step, chunk_bytes=CHUNK, world_size=1)
        found[checkpoint] = write_shard(directory, header, data)
    yield found
    for reader in found.values():
        reader.close()


class Store:
    """A prefix of a store that contains FIRST and BASE."""

    def __init__(
        self, objects: ObjectStore, readers: dict[CheckpointId, DiskShardReader], directory: Path
    ) -> None:
        self.objects = objects
        self.prefix = f"test/{secrets.token_hex(4)}"
        self.readers = readers
        self.directory = directory
        self.honest = self.tier(TurnTaker(objects, "honest", Turns([])))
        self.upload(self.honest, FIRST, None)
        self.commit(self.honest, FIRST)
        self.upload(self.honest, BASE, FIRST)
        assert self.commit(self.honest, BASE)

    def tier(self, objects: ObjectStore) -> ObjectTier:
        return ObjectTier(objects, self.prefix)

    def trailer(self, checkpoint: CheckpointId) -> Trailer:
        return Trailer(self.readers[checkpoint].record, self.readers[checkpoint].table)

    def upload(self, tier: ObjectTier, checkpoint: CheckpointId, base: CheckpointId | None) -> None:
        earlier = None
        if base is not None:
            stored = tier.stored(NAMESPACE, self.readers[base].record.ref)
            earlier = Earlier(stored.trailer, stored.index)
        index = plan_pack(self.trailer(checkpoint), [], earlier, {FIRST, BASE}, base)
        if index is None:
            tier.upload_shard(NAMESPACE, self.readers[checkpoint])
        else:
            tier.upload_pack(NAMESPACE, self.readers[checkpoint], index)

    def commit(self, tier: ObjectTier, checkpoint: CheckpointId) -> bool:
        """Commit as the coordinator does with the rank's report."""
        record = self.readers[checkpoint].record
        index = tier.stored(NAMESPACE, record.ref).index
        bases = set() if index is None or index.base is None else {index.base}
        needs = {} if index is None else index.earlier()
        return commit(tier, NAMESPACE, manifest([record]), needs, bases)

    def exists(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self.honest.list_manifests(NAMESPACE, JOB_UID)

    def assert_comes_back(self, checkpoint: CheckpointId) -> None:
        target = self.directory / secrets.token_hex(4)
        target.mkdir()
        reader = self.readers[checkpoint]
        found = self.honest.download_shard(NAMESPACE, reader.record.ref, CopyWriters(target))
        assert found == reader.record

    def names(self) -> set[str]:
        listed = self.objects.list(f"{self.prefix}/").objects
        return {item.key.split(JOB_UID + "/")[1] for item in listed}


def delete(tier: ObjectTier, checkpoints: list[CheckpointId]) -> None:
    """Delete and sweep as a coordinator that has no record of uploads in progress."""
    for checkpoint in checkpoints:
        tier.delete_checkpoint(NAMESPACE, JOB_UID, checkpoint)
    tier.sweep(NAMESPACE, JOB_UID, RestartRound(0), timedelta(0), tuple)


@pytest.fixture
def place(
    objects: ObjectStore,
    readers: dict[CheckpointId, DiskShardReader],
    tmp_path: Path,
) -> Iterator[Store]:
    found = Store(objects, readers, tmp_path)
    yield found
    found.honest.close()


def test_a_commit_that_nobody_heard_of_is_repeated_although_its_base_went(
    place: Store,
) -> None:
    place.upload(place.honest, NEXT, BASE)
    assert place.commit(place.honest, NEXT)
    delete(place.honest, [FIRST, BASE])
    assert place.commit(place.honest, NEXT)
    place.assert_comes_back(NEXT)
    kept = {name.split("/")[1] for name in place.names() if name.startswith("shards/")}
    assert kept == {f"s0000000000{step}-r000000" for step in (10, 20, 30)}


def test_a_coordinator_that_does_not_know_that_it_was_deposed_commits_after_a_sweep(
    place: Store,
) -> None:
    """Its successor has no record of its upload. The sweep keeps objects that were written recently."""
    place.upload(place.honest, NEXT, BASE)
    swept = place.honest.sweep(NAMESPACE, JOB_UID, RestartRound(1), timedelta(hours=1), tuple)
    assert swept == frozenset()
    assert place.commit(place.honest, NEXT)
    place.assert_comes_back(NEXT)
    place.honest.delete_checkpoint(NAMESPACE, JOB_UID, NEXT)
    place.upload(place.honest, NEXT, None)
    swept = place.honest.sweep(NAMESPACE, JOB_UID, RestartRound(1), timedelta(0), tuple)
    assert swept == {NEXT}, "shards that no process will commit are removed"


def test_two_deleters_and_a_commit_between(
    objects: ObjectStore,
    readers: dict[CheckpointId, DiskShardReader],
    tmp_path: Path,
) -> None:
    """One process deletes FIRST while another commits NEXT, which needs FIRST, and deletes BASE.

    BASE refers to FIRST. The first process has listed the references of BASE, but they are deleted before
    it reads them.
    """
    for requests in range(12):
        place = Store(objects, readers, tmp_path)
        turns = Turns(["deleter"] * requests + ["other"] * 100)

        def one(place: Store = place, turns: Turns = turns) -> None:
            tier = place.tier(TurnTaker(place.objects, "deleter", turns))
            delete(tier, [FIRST])
            turns.end("deleter")
            tier.close()

        def other(place: Store = place, turns: Turns = turns) -> None:
            tier = place.tier(TurnTaker(place.objects, "other", turns))
            place.upload(tier, NEXT, BASE)
            assert place.commit(tier, NEXT)
            delete(tier, [BASE])
            turns.end("other")
            tier.close()

        with ThreadPoolExecutor(2) as threads:
            for future in [threads.submit(one), threads.submit(other)]:
                future.result(HANG_SECONDS)
        place.assert_comes_back(NEXT)
        place.honest.close()


def play(
    place: Store,
    schedule: list[str],
    doomed: list[CheckpointId],
    killed_after: tuple[int | None, int | None] = (None, None),
) -> None:
    """Upload NEXT and delete `doomed` concurrently, then assert everything that must hold."""
    turns = Turns(list(schedule))

    def party(who: str, work: Callable[[ObjectTier], object], lives: int | None) -> object:
        count = 10_000 if lives is None else lives
        tier = place.tier(TurnTaker(place.objects, who, turns, count))
        try:
            return work(tier)
        except Killed as error:
            return error
        finally:
            turns.end(who)
            tier.close()

    def upload(tier: ObjectTier) -> bool | None:
        try:
            place.upload(tier, NEXT, BASE)
        except NotFoundError:
            return None
        return place.commit(tier, NEXT)

    with ThreadPoolExecutor(2) as threads:
        uploader = threads.submit(party, "uploader", upload, killed_after[0])
        deleter = threads.submit(party, "deleter", lambda t: delete(t, doomed), killed_after[1])
        announced = uploader.result(HANG_SECONDS)
        deleter.result(HANG_SECONDS)

    if announced is True:
        assert place.exists(NEXT)
    elif not isinstance(announced, Killed):
        assert not place.exists(NEXT)
        place.honest.upload_shard(NAMESPACE, place.readers[NEXT])
        assert place.commit(place.honest, NEXT)
    for _ in range(2):
        for checkpoint in place.honest.list_manifests(NAMESPACE, JOB_UID):
            place.assert_comes_back(checkpoint)
        delete(place.honest, doomed)
    place.upload(place.honest, LAST, None)
    assert place.commit(place.honest, LAST)
    delete(place.honest, [FIRST, BASE, NEXT])
    place.assert_comes_back(LAST)
    place.honest.close()
    kinds = sorted(name.split("/")[0] for name in place.names())
    assert kinds == ["manifests", "shards"]


@pytest.mark.fault("A process is killed while it deletes a checkpoint")
@pytest.mark.parametrize("doomed", [[BASE], [FIRST, BASE]], ids=["base", "both"])
def test_one_of_them_pauses_at_each_request_and_the_other_does_all(
    objects: ObjectStore,
    readers: dict[CheckpointId, DiskShardReader],
    tmp_path: Path,
    doomed: list[CheckpointId],
) -> None:
    for requests in range(16):
        for first, second in (("uploader", "deleter"), ("deleter", "uploader")):
            place = Store(objects, readers, tmp_path)
            play(place, [first] * requests + [second] * 100, doomed)


@pytest.mark.fault("A process is killed while it deletes a checkpoint")
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    turns_in_a_row=st.lists(
        st.tuples(st.sampled_from(["uploader", "deleter"]), st.integers(1, 12)), max_size=6
    ),
    doomed=st.sampled_from([[BASE], [FIRST], [FIRST, BASE], [BASE, FIRST]]),
    killed_after=st.tuples(
        st.one_of(st.none(), st.integers(0, 8)), st.one_of(st.none(), st.integers(0, 16))
    ),
)
def test_existing_steps_are_restored_and_unneeded_objects_are_deleted(
    objects: ObjectStore,
    readers: dict[CheckpointId, DiskShardReader],
    tmp_path: Path,
    turns_in_a_row: list[tuple[str, int]],
    doomed: list[CheckpointId],
    killed_after: tuple[int | None, int | None],
) -> None:
    place = Store(objects, readers, tmp_path)
    schedule = [who for who, count in turns_in_a_row for _ in range(count)]
    play(place, schedule, doomed, killed_after)
