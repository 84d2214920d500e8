"""The kopf part of the operator: signals, login, and events of our kinds as hints.

This is the only module that imports kopf. A handler turns an event into a key and does nothing else.
When kopf ends, for whatever reason, the process shuts down in order; the next process needs nothing from
its memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import kopf

from holdfast_core.api import (
    GROUP,
    VERSION,
    Checkpoint,
    CheckpointAdoption,
    CheckpointStore,
    TrainingJob,
)
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.access import KubeAccess
from holdfast_operator.model.keys import Key, adoption_key, job_key, store_key


class EndlessBackoff:
    """Endless iterable of delays in seconds between kopf's retries of a request.

    kopf gives a request up when the delays run out. It iterates from the start for each request.
    """

    def __iter__(self) -> Iterator[float]:
        delay = 0.5
        while True:
            yield delay * (0.75 + random.random() / 2)
            delay = min(delay * 2, 10.0)


@dataclass(frozen=True, slots=True)
class HandlerInputs:
    """Inputs of the kopf handlers: settings, API access, and functions that queue a key and end the work."""

    settings: Settings
    access: KubeAccess
    enqueue: Callable[[Key], None]
    end_work: Callable[[], object]


async def run_kopf(inputs: HandlerInputs, stop: asyncio.Event) -> None:
    """Run kopf until a signal arrives, `stop` is set, or kopf ends by itself. Raises what kopf raises."""
    namespaces = inputs.settings.watch_namespaces
    await kopf.operator(
        registry=_registry(inputs),
        settings=_settings(),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        # By default kopf uses the name of the Unix user, and uid 65532 of the image has none.
        identity="holdfast",  # type: ignore[arg-type]  # its NewType is private to kopf
        stop_flag=stop,
    )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # Without scanning, kopf ends when a CRD is missing for a moment (an upgrade of the chart).
    settings.scanning.disabled = False
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 60
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 75
    settings.watching.connect_timeout = 5
    # The default would SIGKILL the process ten minutes after kopf stops without its stop flag.
    settings.process.ultimate_exiting_timeout = None
    return settings


def _registry(inputs: HandlerInputs) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def on_job(namespace: str | None, name: str | None, **_: Any) -> None:
        inputs.enqueue(job_key(namespace or "", name or ""))

    async def on_adoption(namespace: str | None, name: str | None, **_: Any) -> None:
        inputs.enqueue(adoption_key(namespace or "", name or ""))

    async def on_checkpoint(namespace: str | None, spec: kopf.Spec, **_: Any) -> None:
        job = (spec.get("jobRef") or {}).get("name")
        if job:
            inputs.enqueue(job_key(namespace or "", str(job)))

    async def on_store(namespace: str | None, name: str | None, **_: Any) -> None:
        inputs.enqueue(store_key(namespace or "", name or ""))

    async def on_cleanup(**_: Any) -> None:
        # kopf waits for up to five seconds for all tasks of the event loop before it ends. The standby
        # takes over as soon as the work has ended.
        inputs.end_work()

    def login(**_: Any) -> kopf.ConnectionInfo:
        access = inputs.access
        return kopf.ConnectionInfo(
            server=access.server,
            ca_data=access.ca_pem,
            token=access.current_token(),
            certificate_data=access.certificate_pem,
            private_key_data=access.key_pem,
        )

    kopf.on.event(GROUP, VERSION, TrainingJob.PLURAL, registry=registry)(on_job)
    kopf.on.event(GROUP, VERSION, CheckpointAdoption.PLURAL, registry=registry)(on_adoption)
    kopf.on.event(GROUP, VERSION, Checkpoint.PLURAL, registry=registry)(on_checkpoint)
    kopf.on.event(GROUP, VERSION, CheckpointStore.PLURAL, registry=registry)(on_store)
    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(on_cleanup)
    return registry
