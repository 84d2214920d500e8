"""Fetch quarantined shards, manifests and layouts of this node again, from a peer or the object store.

A source may be unreachable for a while. What is missing is therefore recorded, up to a bound, and retried
as long as it is needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from holdfast_core import logs
from holdfast_core.errors import HoldfastError, NotFoundError
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.tiers.sources import SourceErrors
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.restore.fetch import Fetcher

_MAX_MISSING = 256


class Replacer:
    """Record of what is missing on this node since it was quarantined, and its replacement."""

    def __init__(self, tiers: Tiers, fetcher: Fetcher, current: Callable[[], RoundState]) -> None:
        self._tiers = tiers
        self._fetcher = fetcher
        self._current = current
        self._log_changes = logs.Changed()
        self._shards: dict[ShardRef, None] = {}
        self._manifests: dict[tuple[JobUid, CheckpointId], None] = {}
        self._layouts: dict[Digest, ShardRef] = {}

    def shard_is_bad(self, ref: ShardRef) -> None:
        if len(self._shards) < _MAX_MISSING:
            self._shards[ref] = None

    def manifest_is_bad(self, job_uid: JobUid, checkpoint: CheckpointId) -> None:
        if len(self._manifests) < _MAX_MISSING:
            self._manifests[(job_uid, checkpoint)] = None

    def layout_is_bad(self, digest: Digest, ref: ShardRef) -> None:
        """Record a layout as missing. `ref` is a shard of this node that names it."""
        if len(self._layouts) < _MAX_MISSING:
            self._layouts[digest] = ref

    async def replace_missing(self) -> None:
        """Try to replace everything that is missing, once.

        While the sidecar is sealed nothing is tried, because the members of the round are not known.

        One that the disk refuses keeps no other one. Its error is raised at the end.
        """
        if self._current().accepted is None:
            return
        missing: list[tuple[dict[Any, Any], object, Callable[[], Awaitable[bool]]]] = [
            *((self._manifests, name, partial(self._manifest, *name)) for name in self._manifests),
            *((self._layouts, of[0], partial(self._layout, *of)) for of in self._layouts.items()),
            *((self._shards, ref, partial(self._shard, ref)) for ref in self._shards),
        ]
        failed: HoldfastError | OSError | None = None
        for known, name, replace in missing:
            try:
                if await replace():
                    del known[name]
            except (HoldfastError, OSError) as error:
                failed = error
        if failed is not None:
            raise failed

    async def _shard(self, ref: ShardRef) -> bool:
        """Replace a shard. Return whether it is settled: it is here, or it is no longer needed."""
        if (ref.job_uid, ref.checkpoint) in self._manifests:
            return False
        if not await self._is_wanted(ref):
            return True
        source_errors = SourceErrors()
        tier = await self._fetcher.shard(ref, RestorePoint(), source_errors)
        if tier is None:
            self._log_changes.warning(
                str(ref), f"a bad shard cannot be replaced now: {source_errors}"
            )
            return False
        self._log_changes.healthy(str(ref))
        if not await self._is_wanted(ref):
            # Its step was pruned during the fetch, when the pruning could not find the shard.
            await self._tiers.pools.shard.run(self._tiers.node.delete_shard, ref)
            return True
        logs.info("replaced a bad shard", ref=str(ref), source=tier)
        return True

    async def _is_wanted(self, ref: ShardRef) -> bool:
        """Return whether the manifest of the shard's checkpoint is on this node."""
        return ref.checkpoint in await self._tiers.checkpoints(ref.job_uid)

    async def _manifest(self, job_uid: JobUid, checkpoint: CheckpointId) -> bool:
        """Replace a manifest. Return whether it is settled.

        It is if the manifest is here, if no place has it, or if this node has no shard of the checkpoint.
        Without a shard it is not fetched: the checkpoint was pruned here, and a peer may still have it.
        """
        records = await self._tiers.pools.read.run(self._tiers.node.list_shards)
        if not any((r.header.job_uid, r.checkpoint) == (job_uid, checkpoint) for r in records):
            return True
        point = RestorePoint(checkpoint.step, checkpoint.round, job_uid=job_uid)
        source_errors = SourceErrors()
        if await self._fetcher.manifest(point, checkpoint, source_errors) is not None:
            logs.info("replaced a bad manifest", checkpoint=str(checkpoint))
            return True
        self._log_changes.warning(
            str(checkpoint), f"a bad manifest cannot be replaced now: {source_errors}"
        )
        return not source_errors.retryable

    async def _layout(self, digest: Digest, ref: ShardRef) -> bool:
        """Replace a layout. Return whether it is settled: it is here, not needed, or no place has it."""
        if await self._tiers.pools.read.run(self._tiers.node.find, ref) is None:
            return True  # the shard was pruned
        point = RestorePoint(ref.step, ref.round, job_uid=ref.job_uid)
        try:
            await self._fetcher.layout(ref, digest, self._fetcher.namespace_of(point))
        except NotFoundError:
            return True
        except HoldfastError as error:
            self._log_changes.warning(digest, f"a bad layout cannot be replaced now: {error}")
            return False
        logs.info("replaced a bad layout", layout=digest)
        return True
