"""Copy a whole shard from a peer to this node, by the code that downloads it from a store."""

from __future__ import annotations

from collections.abc import Callable

from holdfast_core.errors import CorruptionError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.peer.local_chunks import LocalChunks
from holdfast_core.peer.protocol import Attempts, Peer
from holdfast_core.peer.store import RUN_BYTES, PeerStore
from holdfast_core.store.download.copy import Copied, copy_file
from holdfast_core.tiers.base import NodeTier


def copy_shard(
    peer: Peer, ref: ShardRef, tier: NodeTier, may_go_on: Callable[[], None] = lambda: None
) -> Copied:
    """Copy a shard from a peer to the node tier. It is verified and durable when this returns.

    Blocks. After a broken connection the copy continues where it stopped.

    Args:
        peer: The peer.
        ref: The shard. The node tier does not hold it.
        tier: The node tier of this node.
        may_go_on: Called before each piece and before the commit. An error that it raises ends the copy.

    Raises:
        NotFoundError: The peer does not have the shard.
        CorruptionError: The peer's copy is corrupt. Another source may have a good one.
        RefusedError: The peer refuses the request.
        CapacityError: The shard does not fit on this node.
        AccessDeniedError: A side refuses the other's certificate.
        FormatError: The peer violates the protocol.
        UnavailableError: All attempts failed.

    After an error no part of the copy remains.
    """
    attempts = Attempts(peer.options.attempts)
    store = PeerStore(peer)
    with store.open_shard(ref) as shard, LocalChunks(tier, shard.trailer) as local:
        while True:
            # A copy that a change outside TLS has damaged starts again, inside TLS.
            try:
                return copy_file(shard, tier.begin_copy, RUN_BYTES, local, may_go_on)
            except CorruptionError as error:
                if not store.left_tls:
                    raise
                store.stay_inside()
                attempts.failed(UnavailableError(f"bulk: {ref} from {peer}: outside TLS: {error}"))
