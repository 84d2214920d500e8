"""Which run may upload to a store that no operator fences: the run of the highest round (ADR 0084).

A run puts the object `runs/r<round>.json` before its first upload. From then on every run of a lower round
is refused. All runs of a store belong to one training, whose id each marker repeats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast_core.errors import AlreadyExistsError, FormatError, NotFoundError
from holdfast_core.ids import JobUid, RestartRound
from holdfast_core.messages import codec
from holdfast_core.store.tier import ObjectTier

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
class Run:
    """The marker of a round."""

    round: RestartRound
    marker: RunMarker


class StoreRuns:
    """The markers of one job in a store. Calls block and raise what the store raises."""

    def __init__(self, tier: ObjectTier, namespace: str, job_uid: JobUid) -> None:
        self._tier = tier
        self._prefix = tier.runs_prefix(namespace, job_uid)

    def newest(self) -> Run | None:
        """Return the run of the highest round, or None where no run has uploaded."""
        found = self._rounds()
        while found:
            round_ = found.pop()
            try:
                return Run(round_, self._read(round_))
            except NotFoundError:
                continue  # the run of a higher round has just removed it
        return None

    def take(self, run: Run) -> None:
        """Put the marker of a run, and remove those of older runs. It may be called again.

        Raises:
            TakenError: A run of a higher round has put its marker, another run has this round, or the
                store belongs to another training.
        """
        self.expect_allowed(run)
        try:
            self._tier.put_document(self._key(run.round), codec.dumps(run.marker))
        except AlreadyExistsError:
            self.expect_allowed(run)
            raise
        self.expect_newest(run)
        older = [round_ for round_ in self._rounds() if round_ < run.round]
        self._tier.delete_documents([self._key(round_) for round_ in older])

    def expect_newest(self, run: Run) -> None:
        """Raise TakenError unless this run's marker is the one of the highest round."""
        found = self.newest()
        if found != run:
            who = "no run has" if found is None else f"{_described(found)} has"
            raise TakenError(
                f"{who} taken the store since this run began (round {run.round}): this run uploads "
                "nothing more. Start it again to continue from the newest checkpoint, or give each "
                "training a prefix of its own"
            )

    def expect_allowed(self, run: Run) -> None:
        """Raise TakenError where the markers show that this run may not upload."""
        found = self.newest()
        if found is None:
            return
        if found.marker.training != run.marker.training:
            raise TakenError(
                f"{_described(found)} has uploaded another training ({found.marker.training}) than that "
                f"of this folder ({run.marker.training}): choose another prefix, or an empty folder to "
                "continue the training of the store"
            )
        if found.round > run.round or (found.round == run.round and found != run):
            self.expect_newest(run)

    def _rounds(self) -> list[RestartRound]:
        """Return the rounds that have a marker, the highest last."""
        matches = (
            _NAME.fullmatch(key.removeprefix(self._prefix))
            for key in self._tier.list_documents(self._prefix)
        )
        return sorted(RestartRound(int(match.group(1))) for match in matches if match is not None)

    def _read(self, round_: RestartRound) -> RunMarker:
        document = self._tier.get_document(self._key(round_))
        try:
            return codec.loads(RunMarker, document)
        except FormatError as error:
            raise FormatError(f"{self._key(round_)} in the store: {error}") from error

    def _key(self, round_: RestartRound) -> str:
        return f"{self._prefix}r{round_:06d}.json"


def _described(run: Run) -> str:
    return f"run {run.marker.run} on {run.marker.host} (round {run.round})"
