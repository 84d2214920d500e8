"""Short-lived pods that run one command of the sidecar's program with the keys of a store. Pure.

The operator holds no store keys. What it wants to know of a store, or to do in it, therefore runs in such a
pod in the store's namespace: a probe is an example. The pod writes its result as one JSON object into its
termination message, of which Kubernetes keeps 4 KiB.

A new kind of command takes three steps:

1. A `StoreVerb` and its `StoreRequest` (core/contract.py), and a command of `holdfast-sidecar` that ends with
   `store_command.report_on`, as `process/store_drill.py` does. A failure is a report too:
   `{"error": ..., "message": ...}`.
2. Pure rules: when the command is due, its `StoreCommand`, and what its report means.
3. In the pass over the store (loop/stores.py), `CommandRuns.run` starts the pod and returns its state, and
   `CommandRuns.end` removes the pod once the result is written.

A CheckpointStore owns its pods, so Kubernetes deletes them with it, and its pass is queued at each change of
one. It has at most one pod of a verb at a time. The name of the pod comes from `StoreCommand.seed`. The seed
must stay the same until the run has ended, and must change with the result that is written. Two operators
then create the same pod, and a pod whose result was written is not read again. The name also comes from the
place of the store: a run that is under way when a person corrects the place begins again in the right one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from holdfast_core.api import CheckpointStore
from holdfast_core.contract import STORE_DIR, StoreVerb
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import place_of, store_config, store_view
from holdfast_operator.model.ownership import command_prefix
from holdfast_operator.model.render import HOLDFAST_GROUP, owner_reference, store_sources

STUCK_SECONDS = 20.0
"""Age from which a pod that has not started counts as failed. A pod whose Secret is missing stays in
ContainerCreating, and only its Events name the reason."""
_LATE_SECONDS = 30.0
"""Time after its deadline from which a pod that has not ended counts as failed: its node may be lost."""
_STUCK_REASONS = frozenset({"CreateContainerConfigError", "FailedMount", "ContainerCreating"})


@dataclass(frozen=True, slots=True)
class StoreCommand:
    """A command that a pod runs once."""

    verb: StoreVerb
    seed: str
    """What tells this run from the others of the store's verb."""
    request: str = ""
    """The request in the verb's variable."""
    limit_seconds: int = 120
    """activeDeadlineSeconds of the pod, for image pull and command together."""

    def pod_name(self, store: CheckpointStore) -> str:
        # What a pod did in another place says nothing about this one.
        run = f"{store.uid} {place_of(store_config(store))} {self.seed}"
        digest = hashlib.blake2b(run.encode(), digest_size=5).hexdigest()
        return f"{command_prefix(self.verb)}{store.name[:40].rstrip('-.')}-{digest}"


@dataclass(frozen=True, slots=True)
class CommandView:
    """The pod of a command, with its state and its result."""

    name: str
    uid: str
    phase: str
    terminating: bool
    waiting_reason: str | None
    waiting_message: str
    message: str | None
    """Termination message, else how the pod ended; None while it has not ended."""
    unscheduled: str | None
    """The scheduler's message where it found no node, else None."""


class CommandFailure(StrEnum):
    """Why a command gave no report."""

    SECRET_NOT_FOUND = "SecretNotFound"
    """The pod waits for a Secret with the store's keys."""
    REFUSED = "Refused"
    """The API server refused the pod, or another pod has its name."""
    FAILED = "Failed"
    """It found no node, could not start, did not end in time, or ended without a report."""


@dataclass(frozen=True, slots=True)
class CommandUnderway:
    """The pod has not ended."""


@dataclass(frozen=True, slots=True)
class CommandReport:
    """The pod has ended and has written this JSON object. Its content is not checked."""

    data: Mapping[str, Any]

    @property
    def problem(self) -> str | None:
        """Why the command failed, or None if it did what it was to do."""
        return f"{self.text('error')}: {self.text('message')}" if "error" in self.data else None

    def text(self, key: str) -> str:
        """Return a text of the report, or "" if it has none of this name."""
        value = self.data.get(key)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class CommandFailed:
    """The pod has written no report, and will not write one."""

    failure: CommandFailure
    message: str


CommandState = CommandUnderway | CommandReport | CommandFailed


def render_command(
    store: CheckpointStore, command: StoreCommand, sidecar: SidecarSettings
) -> dict[str, Any]:
    """Return the pod, which complies with the Pod Security profile `restricted`."""
    user = {"runAsNonRoot": True, "runAsUser": HOLDFAST_GROUP, "runAsGroup": HOLDFAST_GROUP}
    view = store_view(store)
    sources = store_sources(view)  # none for an identity to which nothing is mounted
    mount = {"name": "store", "mountPath": STORE_DIR, "readOnly": True}
    volume = {"name": "store", "projected": {"defaultMode": 0o440, "sources": sources}}
    environment = {"HOLDFAST_STORE": view.config.to_json(), "HOLDFAST_STORE_DIR": STORE_DIR}
    if command.request:
        environment[command.verb.variable] = command.request
    return {
        "apiVersion": "v1",
        "kind": labels.POD,
        "metadata": {
            "name": command.pod_name(store),
            "namespace": store.namespace,
            "labels": {
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
                labels.COMPONENT: f"store-{command.verb}",
                labels.STORE_NAME: store.name,
            },
            "ownerReferences": [owner_reference(store)],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": command.limit_seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                **user,
                "fsGroup": HOLDFAST_GROUP,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": str(command.verb),
                    "image": sidecar.image,
                    "imagePullPolicy": sidecar.pull_policy,
                    "command": ["holdfast-sidecar", command.verb.command],
                    "env": [{"name": k, "value": v} for k, v in environment.items()],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                        "limits": {"memory": "256Mi"},
                    },
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [mount] if sources else [],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [volume] if sources else [],
        },
    }


def state_of(
    pod: CommandView, command: StoreCommand, store: CheckpointStore, age_seconds: float
) -> CommandState:
    """Return what the state of a command's pod means.

    Args:
        age_seconds: Time since this operator process first saw the pod.
    """
    what = f"the {command.verb}'s pod"
    if pod.phase in ("Succeeded", "Failed"):
        return parse_report(pod.message or "", what)
    if age_seconds > command.limit_seconds + _LATE_SECONDS:
        text = f"{what} has not ended after {age_seconds:.0f} s: check whether its node is lost"
        return CommandFailed(CommandFailure.FAILED, text)
    if age_seconds < STUCK_SECONDS:
        return CommandUnderway()
    if pod.unscheduled is not None:
        text = f"{what} cannot be scheduled: {pod.unscheduled}"
        return CommandFailed(CommandFailure.FAILED, text)
    if pod.waiting_reason in _STUCK_REASONS:
        text = _missing_secret(pod, store, what)
        return CommandFailed(CommandFailure.SECRET_NOT_FOUND, text)
    if pod.waiting_reason in (None, "PodInitializing"):
        return CommandUnderway()
    text = f"{what} cannot start: {pod.waiting_reason}: {pod.waiting_message}".rstrip(": ")
    return CommandFailed(CommandFailure.FAILED, text)


def parse_report(text: str, what: str) -> CommandReport | CommandFailed:
    """Parse a termination message. Any text but a JSON object is the message of a failed command.

    Args:
        what: What messages call the pod.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if isinstance(data, dict):
        return CommandReport(data)
    message = text.strip()[-1000:] or "it wrote no termination message"
    return CommandFailed(CommandFailure.FAILED, f"{what} failed: {message}")


def _missing_secret(pod: CommandView, store: CheckpointStore, what: str) -> str:
    wanted, view = [], store_view(store)
    if view.credentials_secret is not None:
        names = "keys accessKey and secretKey"
        if view.config.account:
            names = "keys accountKey or sasToken"
        elif view.config.google:
            names = "key serviceAccount.json"
        wanted.append(f"Secret {view.credentials_secret} with {names}")
    if view.ca_secret is not None:
        wanted.append(f"Secret {view.ca_secret} with key ca.crt")
    message = (
        f"{what} has not started for {STUCK_SECONDS:.0f} s: expected in namespace "
        f"{store.namespace}: {', '.join(wanted)}; create what is missing (the operator may not "
        "read Secrets)"
    )
    return f"{message}: {pod.waiting_message}" if pod.waiting_message else message
