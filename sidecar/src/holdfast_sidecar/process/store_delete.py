"""The command that deletes checkpoints of one job in the store, in a pod of its own.

It deletes as the pruning of a gang does: the manifest first, and shards that other checkpoints need stay. It
may be killed at any point: a repeated command completes the deletion.
"""

from __future__ import annotations

import json
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from holdfast_core.contract import DeleteContract
from holdfast_core.ids import MAX_ROUND, CheckpointId, RestartRound, age_of
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.process.store_command import open_tier, report_on


def delete_in_store(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """Delete checkpoints and write the report to the file that the kubelet reads, and to stdout.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `DeleteContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        The exit code: 0, or 1 if not everything was deleted.
    """

    def work() -> tuple[str, int]:
        wanted = DeleteContract.from_json(request)
        with closing(open_tier(store, store_dir)) as tier:
            return json.dumps({"deleted": delete(tier, wanted)}), 0

    return report_on(work, report_path)


def delete(tier: ObjectTier, wanted: DeleteContract) -> int:
    """Delete what the contract names, and return the number of checkpoints. Raises HoldfastError.

    The newest goes first, because it needs objects of earlier ones and never the other way round.
    """
    namespace, uid, kept = wanted.namespace, wanted.job_uid, frozenset(wanted.keep or ())
    doomed = frozenset(wanted.checkpoints)
    if wanted.keep is not None:
        doomed |= frozenset(tier.list_manifests(namespace, uid)) - kept
    for checkpoint in sorted(doomed, key=age_of, reverse=True):
        tier.delete_checkpoint(namespace, uid, checkpoint)
    if wanted.ended:
        _sweep(tier, wanted)
    return len(doomed)


def _sweep(tier: ObjectTier, wanted: DeleteContract) -> None:
    """Delete what no checkpoint of an ended job needs. Objects need not rest: nothing is written."""
    namespace, uid, at_once = wanted.namespace, wanted.job_uid, timedelta(0)
    everything = wanted.keep is not None and not tier.list_manifests(namespace, uid)
    tier.abort_stale(namespace, uid, at_once)
    # The round is above all others, and a coordinator would have swept those of older rounds in the same way.
    tier.sweep(namespace, uid, RestartRound(MAX_ROUND), at_once, frozenset[CheckpointId])
    if everything:
        tier.job(namespace, uid).delete_below("")
