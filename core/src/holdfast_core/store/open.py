"""Open the object store that a training script names by a URL, outside of a cluster, and fence its runs.

No operator fences the runs of such a store. The run of the highest round may upload (ADR 0024). A run puts
the object `runs/r<round>.json` before its first upload. From then on every run of a lower round is refused.
All runs of a store belong to one training, whose id each marker repeats.

A marker carries its digest. A damaged one still shows by its name that a run has taken its round, but it is
not compared with other trainings. A run whose own marker is missing or damaged puts it again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast_core.errors import (
    AlreadyExistsError,
    FormatError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format import keys
from holdfast_core.format.canonical import sealed, unsealed
from holdfast_core.ids import JobUid, RestartRound
from holdfast_core.messages import codec
from holdfast_core.store.access import access_by_url
from holdfast_core.store.probe import ProbeReport
from holdfast_core.store.s3.errors import Retrier, RetryPolicy
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import StoreUrl

logger = logging.getLogger(__name__)

_FOLDER = f"{keys.RUNS}/"
_NAME = re.compile(r"r(\d{6})\.json", re.ASCII)


class TakenError(AlreadyExistsError):
    """Another run, or another training, uploads to the store."""


@dataclass(frozen=True, slots=True)
class RunMarker:
    """What a run writes about itself."""

    training: str
    """Id of the training, the same in every run of a store and in every folder that uploads to it."""
    run: str
    """Id of the run."""
    host: str
    """Name of the machine of rank 0, for messages."""


@dataclass(frozen=True, slots=True)
class MarkedRound:
    """The marker of a round."""

    round: RestartRound
    marker: RunMarker | None
    """None: the marker in the store is damaged."""


class StoreRuns:
    """The markers of one job in a store. Calls block and raise what the store raises."""

    def __init__(self, tier: ObjectTier, namespace: str, job_uid: JobUid) -> None:
        self._objects = tier.job(namespace, job_uid)

    def newest(self) -> MarkedRound | None:
        """Return the run of the highest round, or None where no run has uploaded."""
        found = self._rounds()
        while found:
            round_ = found.pop()
            try:
                return MarkedRound(round_, self._read(round_))
            except NotFoundError:
                continue  # the run of a higher round has just removed it
        return None

    def take(self, run: MarkedRound) -> None:
        """Put the marker of a run, and remove those of older runs. It may be called again.

        Raises:
            TakenError: A run of a higher round has put its marker, another run has this round, or the
                store belongs to another training.
        """
        self.expect_allowed(run)
        with suppress(AlreadyExistsError):  # what is there is looked at next
            self._put(run)
        self.expect_newest(run)
        older = [round_ for round_ in self._rounds() if round_ < run.round]
        self._objects.delete([_key(round_) for round_ in older])

    def expect_newest(self, run: MarkedRound) -> None:
        """Raise TakenError if another run has taken the store.

        If the marker of this run is missing or damaged, it is put again: that is no proof of another run. A
        run of a higher round that lost its marker does the same, and then this run is refused.
        """
        for attempt in range(3):
            found = self.newest()
            if found == run:
                return
            if found is not None and not _is_lost(run, found):
                raise TakenError(
                    f"{_described(found)} has taken the store since this run began (round {run.round}): "
                    "this run uploads nothing more. Start it again to continue from the newest checkpoint, "
                    "or give each training a prefix of its own"
                )
            key = self._objects.key(_key(run.round))
            logger.warning(
                "the marker %s in the store is missing or damaged: writing it again", key
            )
            if attempt:  # what is there is no marker
                self._objects.delete([_key(run.round)])
            with suppress(AlreadyExistsError, UnreadableError):
                self._put(run)
        raise UnavailableError(f"the marker {key} cannot be read after it was written")

    def expect_allowed(self, run: MarkedRound) -> None:
        """Raise TakenError where the markers show that this run may not upload."""
        found = self.newest()
        if found is None:
            return
        ours = run.marker
        if found.marker is not None and ours is not None and found.marker.training != ours.training:
            raise TakenError(
                f"{_described(found)} has uploaded another training ({found.marker.training}) than that "
                f"of this folder ({ours.training}): choose another prefix, or an empty folder to "
                "continue the training of the store"
            )
        if found.round > run.round or (found.round == run.round and found != run):
            self.expect_newest(run)

    def _rounds(self) -> list[RestartRound]:
        """Return the rounds that have a marker, the highest last."""
        matches = (
            _NAME.fullmatch(item.key.removeprefix(_FOLDER)) for item in self._objects.list(_FOLDER)
        )
        return sorted(RestartRound(int(match.group(1))) for match in matches if match is not None)

    def _put(self, run: MarkedRound) -> None:
        """Put the marker of a run. Raises AlreadyExistsError if there is another one."""
        if run.marker is None:
            raise ValueError(f"a run without a marker cannot take a store: {run}")
        self._objects.put(_key(run.round), sealed(codec.dumps(run.marker)))

    def _read(self, round_: RestartRound) -> RunMarker | None:
        """Return a marker, or None if it is damaged. Raises NotFoundError, and what the store raises."""
        name = self._objects.key(_key(round_))
        try:
            return codec.loads(RunMarker, unsealed(self._objects.get(_key(round_)), name))
        except FormatError as error:
            if isinstance(error, UnreadableError) and error.may_pass:
                raise UnavailableError(str(error)) from error
            logger.warning("a marker in the store is damaged: %s", error)
            return None


def _key(round_: RestartRound) -> str:
    return f"{_FOLDER}r{round_:06d}.json"


def _is_lost(run: MarkedRound, newest: MarkedRound) -> bool:
    """Return whether the newest marker shows that the one of this run is missing or damaged."""
    return newest.round < run.round or (newest.round == run.round and newest.marker is None)


def _described(run: MarkedRound) -> str:
    if run.marker is None:
        return f"the run of round {run.round}, whose marker is damaged,"
    return f"run {run.marker.run} on {run.marker.host} (round {run.round})"


_START = RetryPolicy(max_attempts=3, budget_seconds=10.0)
"""Policy of a process that looks for its restore point. It has its own loop, which says what it waits for."""


def open_tier(
    url: StoreUrl,
    env: Mapping[str, str],
    *,
    is_quick: bool = False,
    conditional_put: bool = True,
    throttle: Callable[[int], object] | None = None,
) -> ObjectTier:
    """Open a store. No request is sent before the first call of a method.

    Args:
        url: The store.
        env: Environment variables: endpoint and keys as the tools of the store's cloud take them.
        is_quick: Give up within seconds where the store does not answer.
        conditional_put: Whether a bucket of S3 respects If-None-Match.
        throttle: Receives the size of each part in bytes before it is sent, and may block.

    Raises:
        ConfigError: The endpoint or the profile is not valid. Keys of S3 are looked for at the first
            request.
    """
    access = access_by_url(url, env, conditional_put=conditional_put)
    retrier = Retrier(_START) if is_quick else Retrier()
    store = access.open(retrier=retrier, throttle=throttle)
    return ObjectTier(store, access.config.prefix, readers=access.config.max_concurrency)


def probe_url(url: StoreUrl, env: Mapping[str, str]) -> ProbeReport | None:
    """Probe a store before the first upload. None for a directory, which needs no probe.

    Raises ConfigError as `open_tier` does.
    """
    return access_by_url(url, env).probe()
