"""Remove Kueue's finalizer from deleted pods whose job has no pass: it is gone, or cannot be parsed.

The pass of the job does this for all other pods (decide/features/queue.py). Nothing else is decided about
pods of jobs that are gone, because the garbage collector deletes them.
"""

from __future__ import annotations

from holdfast_operator.decide.features.queue import leaving
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.keys import Key
from holdfast_operator.watch.cache import ClusterCache


async def release_pods(cache: ClusterCache, cluster: Cluster, key: Key) -> None:
    """Remove Kueue's finalizer from the deleted pods of jobs under this key that have no pass.

    Raises HoldfastError where a call fails; the queue then retries the key.
    """
    for action in leaving(cache.pods_without_pass(key)):
        await cluster.release_pod(key.namespace, action.name, action.uid, ends_group=False)
