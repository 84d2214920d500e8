"""The kopf part of the operator: events of our kinds as hints.

This is the only module that imports kopf. A handler turns an event into a key and does nothing else. The
reflectors of watch/ deliver the same events and survive every fault of the API server, while kopf ends at
some of them, and cancels all tasks of its event loop then. So kopf has an event loop of its own, in a thread,
and starts again when it has ended (ADR 0004).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
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
from holdfast_core.clock import Clock
from holdfast_operator.base import logs
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.api import KubeAccess
from holdfast_operator.kube.leadership import LoopThread
from holdfast_operator.model.ownership import Key, adoption_key, job_key, store_key

FIRST_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 60.0
END_SECONDS = 15.0


class EndlessBackoff:
    """Endless iterable of delays in seconds between kopf's retries of a request.

    kopf gives a request up when the delays run out. It iterates from the start for each request.
    """

    def __iter__(self) -> Iterator[float]:
        delay = 0.5
        while True:
            yield delay * (0.75 + random.random() / 2)
            delay = min(delay * 2, 10.0)


class NoDiffs(kopf.DiffBaseStorage):
    """Storage of nothing. No handler asks what has changed, and kopf would copy each object to find out."""

    def build(
        self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None
    ) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return None


@dataclass(frozen=True, slots=True)
class HandlerInputs:
    """Inputs of the kopf handlers: settings, API access, and the functions that they call.

    Both functions are called in the event loop of `run_kopf`.
    """

    settings: Settings
    access: KubeAccess
    enqueue: Callable[[Key, str, str], None]
    """Called with the key that an event concerns, and with the uid and the resourceVersion of its object."""
    failed: Callable[[], None]
    """Called each time that kopf has ended by itself."""


async def run_kopf(inputs: HandlerInputs, clock: Clock) -> None:
    """Run kopf until cancelled. If it ends by itself, it starts again after a growing, jittered delay."""
    delay = FIRST_DELAY_SECONDS
    while True:
        begun = clock.monotonic()
        error = await _run_once(inputs)
        inputs.failed()
        if clock.monotonic() - begun > MAX_DELAY_SECONDS:
            delay = FIRST_DELAY_SECONDS
        logs.warning(
            "kopf has ended, and starts again; until then all events come from the operator's own watches: "
            f"{error or 'without an error'}"
        )
        await clock.sleep(delay * (0.75 + random.random() / 2))
        delay = min(delay * 2, MAX_DELAY_SECONDS)


async def _run_once(inputs: HandlerInputs) -> BaseException | None:
    """Run kopf in a thread until it ends, and return its error. If cancelled, end kopf and wait for it."""
    registry = _registry(inputs, asyncio.get_running_loop())
    namespaces = inputs.settings.watch_namespaces

    async def operate(stop: asyncio.Event) -> None:
        await kopf.operator(
            registry=registry,
            settings=_settings(),
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            # By default kopf uses the name of the Unix user, and uid 65532 of the image has none.
            identity="holdfast",  # type: ignore[arg-type]  # its NewType is private to kopf
            stop_flag=stop,
        )

    thread = LoopThread("kopf", operate)
    thread.start()
    try:
        return await thread.ended()
    finally:
        thread.stop()
        async with asyncio.timeout(END_SECONDS):
            await thread.ended()


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = NoDiffs()
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


def _registry(inputs: HandlerInputs, caller: asyncio.AbstractEventLoop) -> kopf.OperatorRegistry:
    """Return handlers that pass keys on to the event loop of the caller."""
    registry = kopf.OperatorRegistry()

    def watch(plural: str, key_of: Callable[[str, str, kopf.Spec], Key | None]) -> None:
        async def on_event(meta: kopf.Meta, spec: kopf.Spec, **_: Any) -> None:
            key = key_of(meta.namespace or "", meta.name or "", spec)
            if key is not None:
                uid, version = str(meta.get("uid", "")), str(meta.get("resourceVersion", ""))
                caller.call_soon_threadsafe(inputs.enqueue, key, uid, version)

        kopf.on.event(GROUP, VERSION, plural, registry=registry)(on_event)

    def of_checkpoint(namespace: str, _: str, spec: kopf.Spec) -> Key | None:
        job = (spec.get("jobRef") or {}).get("name")
        return job_key(namespace, str(job)) if job else None

    def login(**_: Any) -> kopf.ConnectionInfo:
        access = inputs.access
        return kopf.ConnectionInfo(
            server=access.server,
            ca_data=access.ca_pem,
            token=access.current_token(),
            certificate_data=access.certificate_pem,
            private_key_data=access.key_pem,
        )

    watch(TrainingJob.PLURAL, lambda namespace, name, _: job_key(namespace, name))
    watch(CheckpointAdoption.PLURAL, lambda namespace, name, _: adoption_key(namespace, name))
    watch(Checkpoint.PLURAL, of_checkpoint)
    watch(CheckpointStore.PLURAL, lambda namespace, name, _: store_key(namespace, name))
    kopf.on.login(registry=registry)(login)
    return registry
