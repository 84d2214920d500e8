"""A restore: all ranks fetch the same checkpoint, and each loads its part into its state.

A part is read from the file of its shard straight into the state's tensors where that is possible, and
else fetched into a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from holdfast.base.notices import show_notice
from holdfast.base.restore_point import RestorePoint, TensorInfo
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.in_place import InPlace, read_in_place
from holdfast.connection.link import OpenedFile
from holdfast.connection.session import Session
from holdfast.places.place import NextFetch, Place
from holdfast.places.waiting import wait_connected
from holdfast.slots.staging import SlotRing
from holdfast.state.loading.later_rng import Load
from holdfast.state.loading.load import load_state
from holdfast.state.loading.named_tensors import NamedTensors
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import paused_collector
from holdfast_core.errors import CorruptionError, HoldfastError, NotFoundError, RefusedError
from holdfast_core.format.digest import digest_of
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import Fill, Filled, Restore, RestoreReply, ShardFile, SlotOffer
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
        while True:
            found: _Found | None = None
            failed: HoldfastError | None = None
            try:
                found = fetch(wait_connected(self._session, self._place))
            except HoldfastError as error:
                failed = error
            try:
                step = None if found is None else Step(found.step)
                next_ = self._place.after_fetch(step, failed)
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
        self._ring.close()
        self._place.start(self._session)

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
        offers = tuple(slot.offer() for slot in self._ring.slots)
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
        self, step: Step, target: RestoreTarget, offers: tuple[SlotOffer, ...]
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
            (parse_rank_layout(self._layouts.read(saved.layout)), saved.ranks)
            for saved in reply.layouts
        )
        home = parse_rank_layout(self._layouts.read(reply.home))
        return target.layout(saved_state(home, groups, reply.world_size))

    def _is_as_saved(self, target: RestoreTarget, reply: RestoreReply) -> bool:
        """Return whether this rank's shard fits as it was saved, or its layout is not known."""
        if reply.rank_layout is None:
            return True
        return target.is_as_saved(parse_rank_layout(self._layouts.read(reply.rank_layout)))
