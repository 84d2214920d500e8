"""A failure of the gang, and what the rules make of the failures of a pass. Pure values.

decide/failures.py finds the failures and applies the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_core.api import FailureAction
from holdfast_core.ids import CheckpointId, Worker
from holdfast_operator.model.reasons import Reason

ALL_LOST_SECONDS = 300.0
"""Wait before several lost nodes count as failed while no sidecar of the job answers. A control plane that is
cut off from the nodes is more likely than the loss of all of them. Kubernetes waits as long before it
evicts pods."""
CANNOT_START = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "StartError",
    }
)
"""The kubelet's reasons for containers that can start once a user corrects the image or the pod."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of one worker, or of the gang (worker None)."""

    reason: Reason
    message: str
    worker: Worker | None = None
    disruption: bool = False
    exit_code: int | None = None
    replace_pod: bool = False
    confirm_gone: str | None = None
    """Name of a pod whose absence is the only evidence of this failure."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the failures of a pass lead to."""

    failures: tuple[Failure, ...]
    """All failures, causes before consequences, with the pods that a rule replaces."""
    action: FailureAction = FailureAction.RESTART_GANG
    matched: Failure | None = None
    """The first failure that a rule of failurePolicy matches. None: no rule matches."""
    avoided: frozenset[Worker] = frozenset()
    """Workers whose nodes the rule avoids."""
    note: str = ""
    """Which rule applies, for conditions and Events. "" without a rule."""
    ignored: bool = False
    """Whether the restart does not count towards failurePolicy.maxRestarts."""
    failed_from: CheckpointId | None = None
    """The restore point, if ranks failed by themselves before one had finished a step from it."""
    blamed: Mapping[Worker, Failure] = field(default_factory=dict)
    """Workers on whose nodes the failures count."""

    @property
    def disruption(self) -> bool:
        """Return whether any of the failures is a disruption.

        One disruption explains the other failures: ranks die when one of their peers disappears.
        """
        return any(f.disruption for f in self.failures)

    @property
    def text(self) -> str:
        """Return the message of the first failure, and the rule that applies."""
        message = self.failures[0].message
        return f"{message}; {self.note}" if self.note else message

    @property
    def confirm_gone(self) -> tuple[str, ...]:
        return tuple(f.confirm_gone for f in self.failures if f.confirm_gone is not None)
