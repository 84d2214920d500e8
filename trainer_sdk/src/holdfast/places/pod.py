"""The place of a worker pod: the sidecar, reached by its socket in the shared volume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from holdfast.base.handle import SaveHandle
from holdfast.base.settings import RankSettings
from holdfast.connection.link import Link, connect_to
from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast.places.place import Directories, NextFetch, Traits
from holdfast.reading.opening import Checkpoints, SavedStep
from holdfast.slots.capacity import IN_A_POD
from holdfast_core.contract import LAYOUTS_DIR, SLOTS_DIR, SOCKET_NAME, PodContract
from holdfast_core.errors import ConfigError, HoldfastError, UnavailableError
from holdfast_core.ids import Step

_FIRST_CONNECT_SECONDS = 5.0
_ACKNOWLEDGE_SECONDS = 60.0
"""Longest wait for the sidecar to take the last saves. If its container has ended for the second time, some
25 s pass until it has its ROUND again."""
_COMPARE_SECONDS = 120.0
"""Further time for a step that was saved twice: the sidecar may have to write the first save before."""


class PodPlace:
    """A pod's sidecar. Kubernetes has started it, and it outlives the ranks and finishes their saves."""

    def __init__(self, contract: PodContract, settings: RankSettings) -> None:
        self._shared = Path(contract.shared_dir)
        self.traits = Traits(
            job_uid=contract.job_uid,
            peer="the sidecar",
            slots=contract.slots,
            advice=IN_A_POD,
            interval_steps=settings.interval_steps,
            timing=settings.timing,
            round=settings.round,
            has_nothing=settings.restore_known and settings.restore_step is None,
            knows_what_is_durable=False,
            frees_older_steps=True,
            # The container whose process touches a page first is charged for it. A sidecar that filled
            # untouched slots would be charged for the whole state and killed.
            shares_container=False,
        )

    @property
    def where_to_look(self) -> str:
        return "check the log of the sidecar container and the conditions of the TrainingJob"

    def open(self, store: GangStore | None) -> Directories:
        return Directories(self._shared / SLOTS_DIR, self._shared / LAYOUTS_DIR)

    def holds_slots(self) -> bool:
        """Return True: no other process uses this pod's slots for this rank."""
        return True

    def close(self, *, wait: bool) -> None:
        """Do nothing: the sidecar continues."""

    def start(self, session: Session) -> None:
        """Open the link and wait a few seconds for it. The link continues to try after that."""
        session.open(Link(partial(connect_to, self._shared / SOCKET_NAME), session))
        session.wait_connected(_FIRST_CONNECT_SECONDS)

    def reason_to_give_up(self, session: Session, waited_seconds: float) -> None:
        """Return None: Kubernetes restarts the sidecar's container."""

    def after_fetch(self, step: Step | None, error: HoldfastError | None) -> NextFetch:
        """Keep what was fetched: the operator has chosen the checkpoint for all ranks."""
        if error is None:
            return NextFetch.NONE
        if isinstance(error, UnavailableError):
            return NextFetch.REPEAT
        return NextFetch.FAIL

    def roll_back(self, session: Session, step: Step | None) -> None:
        raise ConfigError(
            "Checkpointer.restore: in a worker pod all ranks of a round start from the restore point "
            "that the operator chose, and this rank has saved since: end the process with an exit "
            "code other than 0, and the gang restarts from its newest checkpoint"
        )

    def describe(self, step: Step, tier: str) -> str:
        return f"the {tier} tier"

    @property
    def location(self) -> str:
        return "the job's checkpoints"

    @property
    def run_id(self) -> str:
        return self.traits.job_uid

    def list(self) -> tuple[SavedStep, ...]:
        raise _managed_by_the_operator("list")

    def checkpoints(self) -> Checkpoints:
        raise _managed_by_the_operator("read")

    def delete(self, step: Step, *, even_last: bool) -> bool:
        raise _managed_by_the_operator("delete")

    def take_for_training(self) -> None:
        """Do nothing: the operator lets one round at a time write."""

    def keep_for_training(self) -> None:
        """Do nothing, as in `take_for_training`."""

    def wait_for_saves(self, session: Session) -> None:
        session.wait_acknowledged(_ACKNOWLEDGE_SECONDS, _COMPARE_SECONDS)

    def is_safe(self, session: Session, handle: SaveHandle, *, waited: bool) -> bool:
        """Return whether the sidecar has acknowledged the save. It then finishes the save by itself."""
        return session.saves.was_acknowledged(handle)


def _managed_by_the_operator(what: str) -> ConfigError:
    return ConfigError(
        f"Checkpointer: a script cannot {what} single checkpoints in a worker pod, where the operator "
        "chooses and prunes them for the whole gang: use the Checkpoint objects (kubectl get checkpoints)"
    )
