"""Calls to sidecars with the operator's certificate, and new certificates for sidecars."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from ssl import SSLContext
from typing import Protocol, TypeVar

from holdfast_core.clock import Clock
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import Certificate
from holdfast_operator.base import logs
from holdfast_operator.sidecars.certificates import LEAF_LIFE, RENEW_AT
from holdfast_operator.sidecars.client import LeafOutOfTimeError, SidecarClient
from holdfast_operator.sidecars.state import PodCalls

T = TypeVar("T")

RENEW_AGAIN = timedelta(minutes=1)
"""Shortest time between two renewals of one sidecar. A sidecar that accepted a new leaf and still shows an
expired one counts as failed until then."""


class Identity(Protocol):
    """Source of the operator's client certificates and of new leaves for sidecars.

    certificates.Certificates implements it.
    """

    async def client(self, job_uid: JobUid) -> SSLContext: ...

    async def renewal_client(self, job_uid: JobUid) -> SSLContext:
        """Return a context that accepts an expired server leaf. Use it only to send a new leaf."""
        ...

    async def renewed(self, job_uid: JobUid, pod: str) -> Certificate: ...


class Leaves:
    """Caller that renews the certificates of sidecars."""

    def __init__(self, client: SidecarClient, identity: Identity, clock: Clock) -> None:
        self._client = client
        self._identity = identity
        self._clock = clock

    def is_due(self, pod: PodCalls) -> bool:
        """Return whether a third or less is left of the life of the leaf that the sidecar showed last."""
        ends_at = pod.target.leaf.ends_at
        if ends_at is None or self._just_renewed(pod):
            return False
        return ends_at - self._clock.utc_now() < LEAF_LIFE * (1 - RENEW_AT)

    async def send(self, uid: JobUid, pod: PodCalls) -> None:
        """Send the sidecar a new leaf. Its present leaf may be expired."""
        context = await self._identity.renewal_client(uid)
        message = await self._identity.renewed(uid, pod.target.pod)
        await self._client.certificate(context, pod.target, message)
        pod.renewed_at = self._clock.utc_now()
        pod.target.leaf.ends_at = None  # the next connection shows the new leaf
        logs.info("certificate renewed", pod=pod.target.pod)

    async def call(
        self, uid: JobUid, pod: PodCalls, call: Callable[[SSLContext], Awaitable[T]]
    ) -> T:
        """Call a sidecar. If its leaf has expired, send a new one and repeat the call.

        The operator is responsible for renewing leaves in time, so an expired one is not a failure of the
        pod.
        """
        renewed_at = pod.renewed_at
        try:
            return await call(await self._identity.client(uid))
        except LeafOutOfTimeError:
            if self._just_renewed(pod):
                raise  # the sidecar accepted a new leaf but does not show it
            async with pod.renewing:
                if pod.renewed_at == renewed_at:  # no other call has renewed the leaf meanwhile
                    await self.send(uid, pod)
        return await call(await self._identity.client(uid))

    def _just_renewed(self, pod: PodCalls) -> bool:
        renewed_at = pod.renewed_at
        return renewed_at is not None and abs(self._clock.utc_now() - renewed_at) < RENEW_AGAIN
