"""The manifests that the sidecars of one job list: each is fetched from one sidecar and verified, once.

Every worker stores the manifests of the whole gang. An inventory therefore lists them by digest only: with
their contents, the replies of a gang would grow with the square of its size. A digest stands for the same
bytes forever, so a manifest that was fetched earlier, or from another sidecar, is never out of date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set

from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.format.manifest import manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid
from holdfast_core.messages.schema import Inventory, ListedManifest
from holdfast_operator.model.job import InventoryView, ManifestView

ALL_SECONDS = 30.0
"""Time-out for the manifests of one inventory. The next one fetches only those that are missing."""

Fetch = Callable[[ListedManifest], Awaitable[bytes | None]]
"""Reads the document of a manifest from the sidecar that lists it. None: the sidecar has deleted it."""


class Manifests:
    """The manifests of one job, by digest."""

    def __init__(self, job_uid: JobUid) -> None:
        self._job_uid = job_uid
        self._known: dict[Digest, ManifestView] = {}
        self._locks: dict[Digest, asyncio.Lock] = {}

    async def view(self, inventory: Inventory, ranks: int, fetch: Fetch) -> InventoryView:
        """Return the inventory of a sidecar with the contents of its manifests.

        Manifests that were deleted after the inventory was made are left out.

        Args:
            inventory: The reply of the sidecar.
            ranks: Number of ranks of the job.
            fetch: Reads a manifest from this sidecar. Its errors are raised.

        Raises:
            UnavailableError: The sidecar did not send all manifests in time.
            FormatError: A manifest is malformed, or is another one than was listed.
        """
        found: list[ManifestView] = []
        try:
            async with asyncio.timeout(ALL_SECONDS):
                for listed in inventory.manifests:
                    manifest = await self._get(listed, ranks, fetch)
                    if manifest is not None:
                        found.append(manifest)
        except TimeoutError as error:
            raise UnavailableError(
                f"the sidecar of pod {inventory.pod} lists {len(inventory.manifests)} manifests and did "
                f"not send them within {ALL_SECONDS:.0f} s"
            ) from error
        return InventoryView(
            round=inventory.round,
            version=inventory.version,
            worker=inventory.worker,
            launcher=inventory.launcher,
            manifests=tuple(found),
            shards=inventory.shards,
            uncommitted=inventory.uncommitted,
        )

    def keep(self, digests: Set[Digest]) -> None:
        """Forget all manifests but these. A `view` under way fetches what it needs of them again."""
        for digest in (self._locks.keys() | self._known.keys()) - digests:
            self._locks.pop(digest, None)
            self._known.pop(digest, None)

    async def _get(self, listed: ListedManifest, ranks: int, fetch: Fetch) -> ManifestView | None:
        """Return a manifest, or None if the sidecar has deleted it.

        Sidecars that list the same manifest wait for the first of them to send it. If that one fails, the
        next one is asked.
        """
        async with self._locks.setdefault(listed.manifest, asyncio.Lock()):
            known = self._known.get(listed.manifest)
            if known is None or (known.step, known.round) != (listed.step, listed.round):
                document = await fetch(listed)
                if document is None:
                    return None
                known = await asyncio.to_thread(self._verified, document, listed, ranks)
                self._known[listed.manifest] = known
            return known

    def _verified(self, document: bytes, listed: ListedManifest, ranks: int) -> ManifestView:
        checkpoint = CheckpointId(listed.step, listed.round)
        digest = manifest_digest(document)
        if digest != listed.manifest:
            raise FormatError(
                f"manifest of {checkpoint}: the sidecar listed digest {listed.manifest} and sent a "
                f"document with digest {digest}"
            )
        manifest = parse_manifest_of(document, self._job_uid, checkpoint)
        shards = manifest.shards if manifest.world_size == ranks else ()
        return ManifestView(listed.step, listed.round, digest, manifest.world_size, shards)
