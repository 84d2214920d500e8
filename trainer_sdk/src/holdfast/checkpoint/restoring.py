"""Finds the checkpoint that this rank starts from and reads its bytes into a slot or into the tensors.

In a pod every rank asks its own sidecar. In a directory the ranks agree:
 1. Rank 0's persister chooses the round and the restore point. Rank 0 writes both to the gang's store.
 2. The other ranks read both and start their persisters with them.
 3. All ranks fetch and verify their shards and write success or failure to the store. Rank 0 reads all
    results and writes the verdict.
 4. If any shard fails verification, all ranks reject that checkpoint and begin again at 1.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.base.layouts import LayoutFiles
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.places import DirectoryPlace, Place
from holdfast.connection.link import Link
from holdfast.connection.session import Session
from holdfast.directory.choice import committed
from holdfast.directory.in_place import InPlace, read_in_place
from holdfast.gang.store import GangStore
from holdfast.slots.staging import SlotRing
from holdfast.state.restore_target import RestoreTarget
from holdfast.state.snapshot import read_payload
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import parse_layout
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import (
    Fill,
    Filled,
    Refusal,
    Restore,
    RestoreReply,
    ShardFile,
)

logger = logging.getLogger(__name__)

_CONNECT_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 3600.0
"""Time-out of a request. A fill may read a whole shard from a slow disk. If the other side ends, the
connection ends, so that a request never waits this long for it."""
_FIRST_CONNECT_SECONDS = 5.0
_SAY_AFTER_SECONDS = 15.0
_GOOD = "good"
_BAD = "bad"
_STARTS = 5
"""Starts of a persister that end before it answers, after which the restore fails."""
_STARTING_SECONDS = 5.0
"""The least time for these starts: memory or descriptors may be short for a moment."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """This rank's part of a checkpoint, verified."""

    step: Step
    tier: str
    saved: Callable[[], dict[str, Any]]
    """Returns the saved state. It is called after the ranks have agreed, so that an invalid payload, which
    raises FormatError, does not make other ranks wait."""
    is_ours: bool
    """Whether the tensors are those of the current state, or in memory that may be kept. Otherwise they are
    views into a slot, valid until the next save."""
    lies_over: CheckpointId | None = None
    """A rejected checkpoint, parts of which are already in the state."""


class Restorer:
    """Opens the session's link and fetches the restore point."""

    def __init__(
        self,
        settings: RankSettings,
        place: Place,
        session: Session,
        ring: SlotRing,
        layouts: LayoutFiles,
        store: GangStore | None,
    ) -> None:
        self._settings = settings
        self._place = place
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._store = store
        self._attempt = 0
        self._lookups = 0
        self._asked: Step | None = None
        """The step that the script asked for. No other step is restored instead."""
        self._left_parts: CheckpointId | None = None
        """The last checkpoint that was read into the state in place, completely or in part."""

    def connect(self) -> None:
        """Connect. In a directory, also agree on the round and the restore point.

        In a pod this waits a few seconds only; the link continues to try.
        """
        if isinstance(self._place, DirectoryPlace):
            self._agree(self._place)
        else:
            self._open_link()
            if self._session.link is not None:
                self._session.link.wait_connected(_FIRST_CONNECT_SECONDS)

    def fetch(self, restore_target: RestoreTarget) -> Fetched | None:
        """Fetch and verify this rank's part of the restore point.

        Returns None when there is nothing to restore. Raises StateMismatchError when the checkpoint was
        saved by another number of ranks, or with other placements, and this rank's state cannot be
        assembled from it. Raises CorruptionError when no checkpoint, or not the requested one, can be
        read, and UnavailableError when a persister does not answer.
        """
        in_directory = isinstance(self._place, DirectoryPlace)
        self._left_parts = None
        from_nothing = self._settings.restore_known and self._settings.restore_step is None
        if from_nothing and not in_directory:
            return None  # the launcher has set this; there is no need to wait for the sidecar
        while True:
            try:
                found = self._fetch_once(restore_target)
                failed: HoldfastError | None = None
            except UnavailableError:
                if isinstance(self._place, DirectoryPlace):
                    raise
                continue  # the connection to the sidecar was lost; ask again when it is back
            except (CorruptionError, RefusedError) as error:
                if not isinstance(self._place, DirectoryPlace) or not _is_bad_copy(error):
                    raise
                found, failed = None, error
            if not isinstance(self._place, DirectoryPlace) or self._place.restore is None:
                return found
            if self._all_succeeded(failed is None) and self._is_asked_for(found):
                return found
            if self._asked is not None:
                step, self._asked = self._asked, None
                raise CorruptionError(
                    f"Checkpointer.restore(step={step}): no copy of it in {self._place.root} can be read by "
                    f"all ranks{'' if failed is None else f' ({failed})'}; restore() takes another step"
                ) from failed
            logger.warning(
                "checkpoint %s cannot be restored by all ranks%s: trying an older one",
                self._place.restore,
                "" if failed is None else f" ({failed})",
            )
            self._reject(self._place)

    # ------------------------------------------------------------------ inside

    def _is_asked_for(self, found: Fetched | None) -> bool:
        return self._asked is None or (found is not None and found.step == self._asked)

    def _fetch_once(self, restore_target: RestoreTarget) -> Fetched | None:
        round_ = self._wait_connected()
        rank = self._settings.rank
        reply = self._request(Restore(round_, rank), RestoreReply)
        point = reply.restore_point
        if point.step is None:
            return None
        wanted = self._wanted(restore_target, reply, round_)
        digest = None
        payload_bytes = reply.payload_bytes
        if wanted is not None:
            document = wanted.to_bytes()
            digest, payload_bytes = digest_of(document), wanted.payload_bytes
            self._layouts.ensure(document, digest)
        # The container whose process touches a page first is charged for it. In a pod, a sidecar that
        # filled untouched slots would be charged for the whole state and killed. A persister runs in this
        # process's container.
        in_directory = isinstance(self._place, DirectoryPlace)
        needed_bytes = max(restore_target.needed_bytes(), payload_bytes)
        self._ring.ensure(needed_bytes, round_, to_fill=in_directory)
        offers = tuple(slot.offer() for slot in self._ring.slots)
        # This process can read the files of a folder. Those of a pod's node tier belong to the sidecar.
        if in_directory and wanted is None and restore_target.is_read_in_place():
            reply = self._request(Fill(round_, rank, offers, reads_files=True), (Filled, ShardFile))
            if isinstance(reply, ShardFile):
                held = None if reply.slot is None else self._ring.find(reply.slot).payload.data
                found = self._read_in_place(reply, restore_target, held)
                if found is not None:
                    saved = found.saved
                    return Fetched(point.step, found.tier, lambda: saved, is_ours=True)
        filled = self._request(Fill(round_, rank, offers, digest), Filled)
        payload = self._ring.find(filled.slot).payload[: filled.payload_bytes]
        return Fetched(
            point.step,
            filled.tier,
            partial(read_payload, payload),
            is_ours=False,
            lies_over=self._left_parts,
        )

    def _read_in_place(
        self, file: ShardFile, restore_target: RestoreTarget, held: memoryview | None
    ) -> InPlace | None:
        """Read the shard into the state's tensors. Return None if it must be requested in a slot instead.

        A load from a slot names what does not fit, a bad shard is quarantined then, and the loaded values
        replace what this method may have left in the state.
        """

        def begins() -> None:
            self._left_parts = file.shard.checkpoint

        try:
            return read_in_place(file, restore_target.leaves, restore_target.fits, held, begins)
        except HoldfastError as error:
            logger.warning("%s; it is read once more", error)
            return None

    def _wanted(
        self, restore_target: RestoreTarget, reply: RestoreReply, round_: RestartRound
    ) -> RankLayout | None:
        """Return the layout to assemble for this rank, or None if its shard fits as it was saved."""
        if reply.world_size in (0, self._settings.world_size):
            if reply.rank_layout is None:
                return None
            if restore_target.is_as_saved(parse_rank_layout(self._layouts.read(reply.rank_layout))):
                return None
            again = Restore(round_, self._settings.rank, with_layout=True)
            reply = self._request(again, RestoreReply)
        if reply.layout is None:
            raise NotFoundError(
                f"the checkpoint of step {reply.restore_point.step} was saved by "
                f"{reply.world_size} ranks, this is one of {self._settings.world_size}, and its "
                "layout was not given"
            )
        return restore_target.layout(parse_layout(self._layouts.read(reply.layout)))

    def _request(self, message: Any, kind: type[Any] | tuple[type[Any], ...]) -> Any:
        if self._session.link is None:
            raise UnavailableError(f"there is no connection to {self._place.peer}")
        reply = self._session.link.request(message, _ANSWER_SECONDS)
        if not isinstance(reply, kind):
            raise UnavailableError(
                f"{type(message).__name__} was answered with {type(reply).__name__}"
            )
        return reply

    def _wait_connected(self) -> RestartRound:
        """Wait until the link is connected, without a time limit, and return the round.

        Kubernetes restarts the sidecar's container, and a folder's disk may be slow. Raises
        CorruptionError or UnavailableError where a folder's persister cannot be expected to answer.
        """
        began = time.monotonic()
        say_at = began + _SAY_AFTER_SECONDS
        while True:
            link = self._session.link
            if link is not None and link.wait_connected(_CONNECT_POLL_SECONDS):
                return self._session.round if self._session.round is not None else RestartRound(0)
            if time.monotonic() >= say_at:
                logger.warning("still waiting for %s to answer", self._place)
                say_at = math.inf
            if isinstance(self._place, DirectoryPlace):
                patient = time.monotonic() - began < _STARTING_SECONDS
                error = _why_never(self._place, self._session, patient=patient)
                if error is not None:
                    if link is not None:
                        link.close()
                    raise error from self._session.greeting_error

    def _open_link(self) -> None:
        place = self._place
        link = Link(place.connect, self._session, place.hello_seconds, place.peer)
        self._session.link = link
        link.start()

    def _agree(self, place: DirectoryPlace) -> None:
        key = f"start/{self._attempt}"
        if self._settings.rank != 0 and self._store is not None:
            value = json.loads(self._store.wait(key))
            if "error" in value:
                raise CorruptionError(f"rank 0 could not open {place.root}: {value['error']}")
            place.round = self._session.round = RestartRound(value["round"])
            place.run_id = value["run"]
            place.restore = _pair(value["restore"])
            self._open_link()
            self._wait_connected()
            return
        place.round = self._session.round = None
        place.look()
        try:
            self._open_link()
            round_ = self._wait_connected()
            point = self._request(Restore(round_, self._settings.rank), RestoreReply).restore_point
        except (HoldfastError, OSError) as error:
            if self._store is not None:
                self._store.publish(key, json.dumps({"error": str(error)}))
            raise
        place.round = round_
        place.restore = None
        if point.step is not None and point.round is not None:
            place.restore = CheckpointId(point.step, point.round)
        if self._store is not None:
            pair = None if place.restore is None else [place.restore.step, place.restore.round]
            value = {"round": round_, "restore": pair, "run": place.run_id}
            self._store.publish(key, json.dumps(value))

    def _all_succeeded(self, succeeded: bool) -> bool:
        if self._store is None:
            return succeeded
        prefix = f"fetched/{self._attempt}"
        self._store.publish(f"{prefix}/{self._settings.rank}", _GOOD if succeeded else _BAD)
        if self._settings.rank == 0:
            text = [self._store.wait(f"{prefix}/{r}") for r in range(self._settings.world_size)]
            self._store.publish(f"{prefix}/verdict", _BAD if _BAD in text else _GOOD)
        return self._store.wait(f"{prefix}/verdict") == _GOOD

    def _reject(self, place: DirectoryPlace) -> None:
        if place.restore is not None:
            place.rejected.append(place.restore)
        self._begin_again(place)

    def roll_back(self, step: Step | None) -> None:
        """Make `step` (None: the newest committed step) the restore point. Call it on every rank.

        This starts a new persister in a new round. Later saves form a new history, which does not collide
        with later steps of the old one, and which a run that starts afterwards prefers.

        Raises ConfigError in a pod, and where the folder has no such step. Raises CorruptionError where
        the folder cannot be read.
        """
        place = self._place
        if not isinstance(place, DirectoryPlace):
            raise ConfigError(
                "Checkpointer.restore: in a worker pod all ranks of a round start from the restore point "
                "that the operator chose, and this rank has saved since: end the process with an exit "
                "code other than 0, and the gang restarts from its newest checkpoint"
            )
        bad = list(place.rejected)
        if step is not None:
            place.rejected = [*bad, *self._newer_than(place, step)]
        self._begin_again(place)
        place.rejected = bad
        self._asked = step

    def _newer_than(self, place: DirectoryPlace, step: Step) -> list[CheckpointId]:
        """Return the checkpoints that the search for `step` must skip (on rank 0; empty on the others).

        Only rank 0 reads the folder, because ranks may see a shared folder at different moments. All
        ranks raise the same ConfigError where it holds no such step.
        """
        self._lookups += 1
        key = f"lookup/{self._lookups}"
        if self._settings.rank != 0 and self._store is not None:
            error = json.loads(self._store.wait(key))
            if error is not None:
                raise ConfigError(error)
            return []
        known = committed(place.root)
        newer = list(itertools.takewhile(lambda one: one.step != step, known))
        error = None if len(newer) < len(known) else _no_such_step(place, step, known)
        if self._store is not None:
            self._store.publish(key, json.dumps(error))
        if error is not None:
            raise ConfigError(error)
        return newer

    def _begin_again(self, place: DirectoryPlace) -> None:
        self._attempt += 1
        if self._session.link is not None:
            self._session.link.close()
        self._ring.close()
        self._agree(place)


def _why_never(place: DirectoryPlace, session: Session, *, patient: bool) -> HoldfastError | None:
    """Return why the persister cannot be expected to answer, as an error, or None if it may still answer."""
    if isinstance(session.greeting_error, RefusedError) and (
        session.greeting_error.code == Refusal.BUSY
    ):
        return UnavailableError(f"{place.root}: {session.greeting_error}")
    if session.greeting_error is not None:
        return CorruptionError(f"{place.root}: {session.greeting_error}")
    if patient or session.losses < _STARTS:
        return None
    ended = ""
    if place.exit_status is not None:
        status = place.exit_status
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        ended = f" (the one before that ended with {how}, and said why on standard error)"
    return UnavailableError(
        f"{place} never answered, {session.losses} times in a row: {session.lost_because}{ended}"
    )


def _pair(value: list[int] | None) -> CheckpointId | None:
    return None if value is None else CheckpointId(Step(value[0]), RestartRound(value[1]))


def _no_such_step(place: DirectoryPlace, step: Step, known: list[CheckpointId]) -> str:
    steps = ", ".join(str(one) for one in sorted({checkpoint.step for checkpoint in known}))
    return (
        f"Checkpointer.restore(step={step}): {place.root} holds no such checkpoint; it has steps "
        f"{steps or 'none'}"
    )


def _is_bad_copy(error: HoldfastError) -> bool:
    return isinstance(error, CorruptionError) or (
        isinstance(error, RefusedError) and error.code in (Refusal.CONFLICT, Refusal.NOT_FOUND)
    )
