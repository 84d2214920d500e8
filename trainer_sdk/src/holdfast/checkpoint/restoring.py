"""A restore: all ranks fetch the same checkpoint, and each loads its part into its state.

A part is read from the file of its shard straight into the state's tensors where that is possible, and
else fetched into a slot.

`Peeker` reads what the restore point holds, apart from the bytes of its tensors:

1. Every rank asks for the restore point of its round and reads the layouts of the ranks that saved it. They
   have the names, dtypes and shapes of all tensors.
2. Rank 0 requests a payload without tensors in a slot of its own, so that the slots of its ring keep what
   they hold. The payload has the objects of the old rank 0. Rank 0 writes them to the gang's store.
3. The other ranks read them there, so that all ranks get the same values.
4. The ranks agree that all of them have succeeded, as after a restore.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from holdfast.base.handle import RestorePoint, TensorInfo
from holdfast.base.notices import show_notice
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.in_place import InPlace, read_in_place
from holdfast.connection.link import OpenedFile
from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast.places.place import NextFetch, Place, wait_connected
from holdfast.slots.staging import SlotRing
from holdfast.state.loading.load import load_state
from holdfast.state.loading.named_tensors import NamedTensors
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.rng import Load
from holdfast.state.snapshot import paused_collector
from holdfast.state.tensors import own_name
from holdfast.state.tree import STATE, Decoder
from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.payload import plan_payload, unpack_objects
from holdfast_core.format.rank_layout import RankLayout, TensorSlice, owner_of, parse_rank_layout
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import Fill, Filled, Restore, RestoreReply, ShardFile
from holdfast_core.reshard.boxes import saved_state
from holdfast_core.shm.shared_files import LayoutFiles

logger = logging.getLogger(__name__)


class _OfStep(Protocol):
    @property
    def step(self) -> int: ...


_Found = TypeVar("_Found", bound=_OfStep)


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
    """Fetches and loads the restore point. Only the training thread uses it."""

    def __init__(
        self,
        settings: RankSettings,
        place: Place,
        session: Session,
        ring: SlotRing,
        layouts: LayoutFiles,
    ) -> None:
        self._settings = settings
        self._place = place
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._left_parts: CheckpointId | None = None
        """The last checkpoint that was read into the state in place, completely or in part."""
        self.agreements = 0
        """Number of fetches after which the ranks have agreed. The same on every rank."""
        self._starts_again = False
        """Whether the next fetch needs another round, because a start or a search failed, or no connection
        can be expected. What the place knows of that round says nothing of other checkpoints."""

    def fetch(self, target: RestoreTarget | NamedTensors) -> Fetched | None:
        """Fetch the checkpoint that all ranks can read. Return None when there is nothing to restore.

        Raises:
            StateMismatchError: The checkpoint was saved by another number of ranks, or with other
                placements, and this rank's state cannot be assembled from it.
            CorruptionError: No checkpoint, or not the requested one, can be read.
            UnavailableError: A persister does not answer.
        """
        self._left_parts = None
        return self.agreed(lambda round_: self._fetch(target, round_))

    def agreed(self, fetch: Callable[[RestartRound], _Found | None]) -> _Found | None:
        """Call `fetch` for checkpoints until all ranks have succeeded with the same one.

        Returns what it has returned. None: there is nothing to restore. Raises its errors, and what
        `Place.after_fetch` raises.
        """
        if self._place.traits.has_nothing:
            return None
        if self._starts_again:
            self._start_again()
        while True:
            found: _Found | None = None
            failed: HoldfastError | None = None
            try:
                found = fetch(wait_connected(self._session, self._place))
            except HoldfastError as error:
                failed = error
            try:
                step = None if found is None else Step(found.step)
                self._starts_again = True
                next_ = self._place.after_fetch(step, failed)
                self._starts_again = not self._session.is_open
                if next_ is not NextFetch.REPEAT:
                    self.agreements += 1
                match next_:
                    case NextFetch.FAIL if failed is not None:
                        raise failed
                    case NextFetch.NONE | NextFetch.FAIL:
                        return found
                    case NextFetch.REPEAT:
                        continue
                    case NextFetch.OLDER:
                        self._start_again()
            finally:
                # The error refers to this frame by its traceback. If the frame referred to the error, the
                # state would stay in memory until the next garbage collection.
                failed = None

    def load(
        self,
        found: Fetched,
        state: MutableMapping[str, Any],
        target: RestoreTarget,
        before_rng: Callable[[], None] | None,
        defer_rng: Callable[[Load], None] | None,
    ) -> tuple[str, ...]:
        """Load what was fetched into `state`. Return one line for each entry that was skipped.

        Raises StateMismatchError before anything is loaded, and CorruptionError where parts of another
        checkpoint would stay in the state.
        """
        saved = found.saved()
        if found.lies_over is not None and not target.fits(saved):
            raise CorruptionError(
                f"checkpoint {found.lies_over} was found damaged after parts of it had been loaded "
                f"into the state, and step {found.step} does not overwrite all of them: create the "
                "state again and restore again"
            )
        skipped = load_state(
            state,
            saved,
            strict=target.strict,
            before_rng=before_rng,
            is_ours=found.is_ours,
            defer=defer_rng,
        )
        self._ring.touch_meanwhile()
        for line in skipped:
            logger.warning("not restored: %s", line)
        # Logged on every rank: each reads its own copy, and one slow tier delays all ranks.
        logger.info("rank %d restored step %d from %s", self._settings.rank, found.step, found.tier)
        self.notify_user(
            "restored step %d from %s", found.step, self._place.describe(found.step, found.tier)
        )
        return skipped

    def named(self, tensors: Mapping[str, Any]) -> NamedTensors:
        """Return what this rank needs from a checkpoint for these tensors."""
        return NamedTensors(tensors, self._settings.rank, TensorInfo)

    def load_tensors(self, found: Fetched, target: NamedTensors) -> RestorePoint:
        """Load what was fetched into the named tensors."""
        objects = found.saved()
        self._ring.touch_meanwhile()
        logger.info(
            "rank %d restored %d tensors of step %d from %s",
            self._settings.rank,
            target.count,
            found.step,
            found.tier,
        )
        return RestorePoint(found.step, target.found, objects)

    def roll_back(self, step: Step | None) -> None:
        """Make `step`, or the newest committed step, the restore point. Every rank must call it.

        Raises ConfigError in a pod, and where the folder has no such step. Raises CorruptionError where
        the folder cannot be read.
        """
        self._place.roll_back(self._session, step)
        self._start_again()

    def notify_user(self, message: str, *args: object) -> None:
        """Show a notice to the user, on rank 0 only."""
        if self._settings.rank == 0:
            show_notice(logger, message, *args)

    def _start_again(self) -> None:
        """Start a new round. It gets new slots, because those of the old round may still be read."""
        self._session.close()
        self._session.saves.report_no_more_uploads(
            "a restore began another round before this save was in the object store"
        )
        self._ring.close()
        self._starts_again = True
        self._place.start(self._session)
        self._starts_again = False

    # The collector would visit the objects of a large state again and again, at each step of the way.
    @paused_collector()
    def _fetch(self, target: RestoreTarget | NamedTensors, round_: RestartRound) -> Fetched | None:
        """Fetch and verify this rank's part once. Return None when there is nothing to restore."""
        rank = self._settings.rank
        reply = self._session.request(Restore(round_, rank), RestoreReply)
        step = reply.restore_point.step
        if step is None:
            return None
        wanted = self._wanted(target, reply, round_)
        digest = None
        payload_bytes = reply.payload_bytes
        if wanted is not None:
            document = wanted.to_bytes()
            digest, payload_bytes = digest_of(document), wanted.payload_bytes
            self._layouts.ensure(document, digest)
        is_local = self._place.traits.shares_container
        in_place = target if wanted is None and isinstance(target, RestoreTarget) else None
        if in_place is not None and not in_place.is_read_in_place():
            in_place = None
        slot_bytes = max(target.needed_bytes(), payload_bytes)
        self._ring.ensure(slot_bytes, round_, to_fill=is_local or in_place is not None)
        offers = tuple(slot.name for slot in self._ring.slots)
        if in_place is not None:
            found = self._fetch_file(step, in_place, offers)
            if found is not None:
                return found
            # From here on the slots are filled: by another container, unless it is local.
            self._ring.ensure(slot_bytes, round_, to_fill=is_local)
        filled = self._session.request(Fill(round_, rank, offers, digest), Filled)
        payload = self._ring.find(filled.slot).payload[: filled.payload_bytes]
        return Fetched(
            step,
            filled.tier,
            partial(target.read, payload),
            is_ours=False,
            lies_over=self._left_parts,
        )

    def _fetch_file(
        self, step: Step, target: RestoreTarget, offers: tuple[str, ...]
    ) -> Fetched | None:
        """Read the shard's file into the state's tensors. Return None if a slot is needed instead."""
        fill = Fill(self._session.current_round, self._settings.rank, offers, reads_files=True)
        try:
            reply = self._session.request(fill, ShardFile, OpenedFile)
        except RefusedError as error:
            logger.info("%s; the shard is requested in a slot", error)
            return None
        file, fd = (reply.file, reply.fd) if isinstance(reply, OpenedFile) else (reply, None)
        held = None if file.slot is None else self._ring.find(file.slot).payload.data
        found = self._read_in_place(file, fd, target, held)
        if found is None:
            return None
        saved = found.saved
        return Fetched(step, found.tier, lambda: saved, is_ours=True)

    def _read_in_place(
        self, file: ShardFile, fd: int | None, target: RestoreTarget, held: memoryview | None
    ) -> InPlace | None:
        """Read the shard into the state's tensors. Return None if it must be requested in a slot instead.

        A load from a slot names what does not fit, a bad shard is quarantined then, and the loaded values
        replace what this method may have left in the state.
        """

        def begins() -> None:
            self._left_parts = file.shard.checkpoint

        try:
            return read_in_place(file, target, held, begins, fd)
        except HoldfastError as error:
            logger.warning("%s; it is read again", error)
            return None

    def _wanted(
        self, target: RestoreTarget | NamedTensors, reply: RestoreReply, round_: RestartRound
    ) -> RankLayout | None:
        """Return the layout to assemble for this rank, or None if its shard fits as it was saved."""
        if reply.world_size in (0, self._settings.world_size):
            if isinstance(target, RestoreTarget) and self._is_as_saved(target, reply):
                return None
            again = Restore(round_, self._settings.rank, with_layouts=True)
            reply = self._session.request(again, RestoreReply)
        if reply.home is None:
            raise NotFoundError(
                f"the checkpoint of step {reply.restore_point.step} was saved by "
                f"{reply.world_size} ranks, this rank is one of {self._settings.world_size}, and "
                "the reply has no layouts"
            )
        groups = (
            (parse_rank_layout(self._layouts.read(digest)), ranks)
            for digest, ranks in reply.layouts.items()
        )
        home = parse_rank_layout(self._layouts.read(reply.home))
        return target.layout(saved_state(home, groups, reply.world_size))

    def _is_as_saved(self, target: RestoreTarget, reply: RestoreReply) -> bool:
        """Return whether this rank's shard fits as it was saved, or its layout is not known."""
        if reply.rank_layout is None:
            return True
        return target.is_as_saved(parse_rank_layout(self._layouts.read(reply.rank_layout)))


_PIECE_CHARACTERS = 1 << 20
"""torch's store refuses values of more than 8 MiB."""

_Infos = dict[str, TensorInfo]


class Peeker:
    """Reads the restore point's names and objects. Only the training thread uses it."""

    def __init__(
        self,
        settings: RankSettings,
        session: Session,
        ring: SlotRing,
        layouts: LayoutFiles,
        restorer: Restorer,
        store: GangStore | None,
    ) -> None:
        self._settings = settings
        self._session = session
        self._ring = ring
        self._layouts = layouts
        self._restorer = restorer
        self._store = store

    def peek(self) -> RestorePoint | None:
        """Return the restore point that all ranks can read, or None if there is nothing to restore.

        Every rank must call it. Raises what `Restorer.fetch` raises, except StateMismatchError.
        """
        return self._restorer.agreed(self._look)

    def _look(self, round_: RestartRound) -> RestorePoint | None:
        """Look once. If rank 0 fails, the others, which wait for what it reads, get an error instead."""
        try:
            found = self._read(round_)
        except UnavailableError:
            raise  # a lost connection: all ranks keep waiting, and this rank tries again
        except HoldfastError as error:
            if self._settings.rank == 0:
                self._publish({"error": str(error)}, "")
            raise
        if found is None:
            return None
        step, shared, own, objects = found
        if self._settings.rank == 0:
            kept = {f: [t.dtype, *t.shape] for f, t in own.items()}
            self._publish({"step": step, "own": kept}, objects)
        return _restore_point(step, shared, own, objects)

    def _read(self, round_: RestartRound) -> tuple[Step, _Infos, _Infos, str] | None:
        """Return the step, the tensors of the gang and those of the old rank 0, and its objects."""
        request = Restore(round_, self._settings.rank, with_layouts=True)
        reply: RestoreReply = self._session.request(request, RestoreReply)
        step = reply.restore_point.step
        if step is None:
            return None
        shared: _Infos = {}
        for digest in reply.layouts:
            layout = parse_rank_layout(self._layouts.read(digest))
            shared |= {f: _info(t) for f, t in layout.tensors.items() if owner_of(f) is None}
        if self._settings.rank != 0:
            objects, own = self._received(step)
            return step, shared, own, objects
        if reply.home is None:
            raise FormatError(f"the reply has no layout of a rank that saved step {step}")
        home = parse_rank_layout(self._layouts.read(reply.home))
        own = {f: _info(t) for f, t in home.tensors.items() if owner_of(f) is not None}
        return step, shared, own, self._read_objects(home)

    # ------------------------------------------------------------------ the objects of rank 0

    def _read_objects(self, home: RankLayout) -> str:
        if not home.objects:
            return json.dumps({STATE: {}})
        room = max(place.length_bytes for place in home.objects.values())
        planned = plan_payload((), room)
        wanted = RankLayout(
            self._settings.rank,
            {},
            dict.fromkeys(home.objects, planned.objects),
            planned.total_bytes,
        )
        document = wanted.to_bytes()
        digest = digest_of(document)
        self._layouts.ensure(document, digest)
        with self._ring.lent(planned.total_bytes) as slot:
            fill = Fill(self._session.current_round, self._settings.rank, (slot.name,), digest)
            self._session.request(fill, Filled)
            return slot.payload[planned.objects.start : planned.objects.stop].tobytes().decode()

    def _publish(self, head: dict[str, Any], text: str) -> None:
        if self._store is None:
            return
        key = self._key()
        pieces = range(0, len(text), _PIECE_CHARACTERS)
        for number, start in enumerate(pieces):
            self._store.publish(f"{key}/{number}", text[start : start + _PIECE_CHARACTERS])
        self._store.publish(key, json.dumps({**head, "pieces": len(pieces)}))

    def _received(self, step: Step) -> tuple[str, _Infos]:
        if self._store is None:
            raise UnavailableError(f"rank {self._settings.rank} has no store of its gang")
        key = self._key()
        head = json.loads(self._store.wait(key))
        if "error" in head:
            raise CorruptionError(f"rank 0 could not read step {step}: {head['error']}")
        if head["step"] != step:
            raise CorruptionError(
                f"rank {self._settings.rank} was given step {step} to restore, rank 0 {head['step']}"
            )
        text = "".join(self._store.wait(f"{key}/{number}") for number in range(head["pieces"]))
        own = {f: TensorInfo(dtype, tuple(shape)) for f, (dtype, *shape) in head["own"].items()}
        return text, own

    def _key(self) -> str:
        return f"peek/{self._restorer.agreements}"


def _info(item: TensorSlice) -> TensorInfo:
    return TensorInfo(own_name(item.dtype), item.shape)


def _restore_point(
    step: Step, shared: _Infos, own: Mapping[str, TensorInfo], text: str
) -> RestorePoint:
    """Decode the objects, with a TensorInfo in the place of each tensor."""
    tensors = dict(shared)

    def resolve(reference: dict[str, Any]) -> TensorInfo:
        name = reference["$tensor"]
        found = shared.get(name) or own.get(name)
        if found is None:
            raise FormatError(
                f"step {step}: the state refers to tensor {name!r}, which does not exist"
            )
        if (dtype := reference.get("dtype")) is not None:
            # It is stored as bytes, which are one more dimension.
            found = TensorInfo(str(dtype), found.shape[:-1])
        if name in tensors:
            tensors[name] = found
        return found

    root = unpack_objects(text.encode())
    if not isinstance(root, dict) or not isinstance(root.get(STATE), dict):
        raise FormatError(f"step {step}: the objects contain no state")
    objects = Decoder(resolve).decode(root[STATE])
    if not isinstance(objects, dict):
        raise FormatError(f"step {step}: the state is not a dict")
    return RestorePoint(step, tensors, objects)
