"""Bulk connections between sidecars: the rules of this sidecar's server, and calls to other servers.

The server's threads only read the fencing state, which is replaced as a whole and never changed in place.
The calls of `BulkPeers` block: run them in a pool. `Members`
has the clients of all other sidecars of the gang.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import RefusedError
from holdfast_core.ids import ShardRef
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import Member, Refusal
from holdfast_core.peer.protocol import BulkOptions, Peer
from holdfast_core.peer.server import BulkServer, shards_of
from holdfast_core.peer.store import PeerStore, copy_shard
from holdfast_core.shards.file import Trailer
from holdfast_core.store.download.shard import Copied
from holdfast_core.tiers.base import NodeTier, ShardSource
from holdfast_sidecar.base.rounds import RoundState, refuse_reader
from holdfast_sidecar.wire.bodies import ClosedConnections
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.server import caller_of

_OPTIONS = BulkOptions(attempts=2)
"""Few attempts suffice, because after an error a caller tries the next source or retries with back-off."""


class BulkServing:
    """The bulk server and its `BulkHandler`. It serves reads to all members of the current ROUND."""

    def __init__(
        self,
        contract: SidecarContract,
        node: NodeTier,
        context: ssl.SSLContext,
        current: Callable[[], RoundState],
        throttle: Callable[[int], None],
        *,
        dropped: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """Create the server; `start` begins to serve.

        Args:
            contract: The contract of this pod.
            node: Has the shards.
            context: TLS with the certificate of this pod.
            current: Returns the state of the round.
            throttle: Blocks until a background transfer may move so many more bytes.
            dropped: As in `ControlServer`.
        """
        self._contract = contract
        self._node = node
        self._context = context
        self._current = current
        self._throttle = throttle
        self._closed = ClosedConnections("bulk", dropped)
        self._server: BulkServer | None = None

    def start(self, host: str, port: int) -> int:
        """Start the server and return its port. Raises ConfigError."""
        self._server = BulkServer(
            self,
            shards_of(self._node),
            self._context,
            dropped=lambda reason: self._closed(reason, f"a bulk connection was closed: {reason}"),
        )
        return self._server.start(host, port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def authorize(self, peer_dns_name: str, key: str) -> None:
        """Raise RefusedError unless the caller is a member of the current ROUND or the operator."""
        caller = caller_of((peer_dns_name,), self._contract.job_uid)
        if caller is None:
            raise RefusedError(
                Refusal.NOT_MEMBER,
                (
                    f"{peer_dns_name!r} is not the name of the operator or of a worker of job "
                    f"{self._contract.job_uid}"
                ),
            )
        raise_refused(refuse_reader(self._current(), caller))

    def allows_plain(self) -> bool:
        return plain_copies(self._current())

    def throttle(self, byte_count: int) -> None:
        self._throttle(byte_count)


class BulkPeers:
    """Client of the other members' bulk servers."""

    def __init__(
        self,
        node: NodeTier,
        context: ssl.SSLContext,
        peers: Peers,
        current: Callable[[], RoundState],
    ) -> None:
        self._node = node
        self._context = context
        self._peers = peers
        self._current = current

    def copy(
        self,
        member: Member,
        ref: ShardRef,
        *,
        background: bool = False,
        may_go_on: Callable[[], None] = lambda: None,
    ) -> Copied:
        """Copy a shard from a member. It is verified and durable on this node when this returns.

        Args:
            member: The member that has the shard.
            ref: The shard.
            background: No rank waits for the copy, so the member limits its rate.
            may_go_on: Raises an error that ends the copy.

        Raises:
            NotFoundError: The member does not have the shard.
            CorruptionError: The member's copy is corrupt.
            CapacityError: This node has no room.
            RefusedError, AccessDeniedError, UnavailableError: The member does not serve it.
        """
        options = replace(_OPTIONS, background=background)
        return copy_shard(self._peer(member, options), ref, self._node, may_go_on)

    def open(self, member: Member, ref: ShardRef) -> ShardSource:
        """Open a member's shard to read ranges of it.

        Raises:
            NotFoundError: The member does not have the shard.
            CorruptionError: The member's copy is corrupt.
            RefusedError, AccessDeniedError, UnavailableError: The member does not serve it.
        """
        return PeerStore(self._peer(member, _OPTIONS)).open_shard(ref)

    def fetch_table(self, member: Member, ref: ShardRef) -> Trailer:
        """Fetch the chunk table of a member's shard, which is verified against the digest in `ref`.

        There is only one attempt. Raises what `open` raises.
        """
        peer = self._peer(member, replace(_OPTIONS, attempts=1))
        with PeerStore(peer).open_shard(ref) as shard:
            return shard.trailer

    def _peer(self, member: Member, options: BulkOptions) -> Peer:
        endpoint = self._peers.endpoint(member)
        return Peer(
            endpoint.host,
            endpoint.bulk_port,
            self._peers.server_name(member),
            self._context,
            replace(options, plain=plain_copies(self._current())),
        )


def plain_copies(state: RoundState) -> bool:
    """Return whether payloads may travel outside TLS: there is a current ROUND, and its policy allows it."""
    return state.accepted is not None and state.accepted.policy.plain_copies


@dataclass(frozen=True, slots=True)
class Members:
    """The two ways to reach a member: messages to its control port, and bytes to its bulk port."""

    control: Peers
    bulk: BulkPeers
