"""Bulk connections between sidecars: the rules of this sidecar's server, and calls to other servers.

The server's threads only read the fencing state, which is replaced as a whole and never changed in place.
The calls of `BulkPeers` block: run them in a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import RefusedError
from holdfast_core.ids import RestartRound, ShardRef, ranks_of
from holdfast_core.messages.schema import Member, Refusal
from holdfast_core.peer.client import fetch_shard, send_copy
from holdfast_core.peer.protocol import BulkOptions
from holdfast_core.peer.ranges import PeerShard
from holdfast_core.peer.remote import Peer
from holdfast_core.peer.server import BulkServer
from holdfast_core.shards.file import Trailer
from holdfast_core.tiers.base import NodeTier, ShardRecord
from holdfast_sidecar.base.rounds import Caller, RoundState, refuse_copy, refuse_reader
from holdfast_sidecar.wire.certificates import Certificates
from holdfast_sidecar.wire.client import Peers, raise_refused
from holdfast_sidecar.wire.closed import ClosedConnections
from holdfast_sidecar.wire.server import caller_of

_OPTIONS = BulkOptions(attempts=2)
"""Few attempts suffice, because after an error a caller tries the next source or retries with back-off."""


class BulkServing:
    """The bulk server and its `BulkHandler`.

    It accepts copies only from members that are assigned to this worker in the current ROUND, and serves
    reads to all members of that ROUND.
    """

    def __init__(
        self,
        contract: SidecarContract,
        node: NodeTier,
        certificates: Certificates,
        current: Callable[[], RoundState],
        *,
        expected: Callable[[], Container[str]] = frozenset,
        dropped: Callable[[str, str], None] = lambda port, reason: None,
    ) -> None:
        """Create the server; `start` begins to serve. `expected` and `dropped` are as in `ControlServer`."""
        self._contract = contract
        self._node = node
        self._certificates = certificates
        self._current = current
        self._expected = expected
        self._closed = ClosedConnections("bulk", dropped)
        self._server: BulkServer | None = None

    def start(self, host: str, port: int) -> int:
        """Start the server and return its port. Raises ConfigError."""
        self._server = BulkServer(
            self,
            self._node,
            self._certificates.server,
            expected=self._expected,
            dropped=lambda reason: self._closed(reason, f"a bulk connection was closed: {reason}"),
        )
        return self._server.start(host, port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        """Check that the caller may put a copy of this shard here.

        Raises:
            StaleRoundError: The copy is of an older round.
            RefusedError: The round is not the current one, the caller is not a member that is assigned to
                copy to this worker, or the shard is not of one of the caller's ranks.
        """
        state = self._current()
        caller = self._caller(peer_dns_name)
        refused = refuse_copy(state, caller, round)
        if refused is not None:
            raise_refused(refused)
        member = state.member_of_pod(caller.pod)
        own = member is not None and ref.rank in ranks_of(
            member.worker, self._contract.procs_per_worker
        )
        if not own or ref.job_uid != self._contract.job_uid:
            raise RefusedError(
                Refusal.NOT_ASSIGNED, f"{caller.pod} may not put a copy of rank {ref.rank}"
            )

    def authorize_get(self, peer_dns_name: str, ref: ShardRef) -> None:
        """Raise RefusedError unless the caller is a member of the current ROUND or the operator."""
        caller = self._caller(peer_dns_name)
        refused = refuse_reader(self._current(), caller)
        if refused is not None:
            raise_refused(refused)

    def allows_plain(self) -> bool:
        return plain_copies(self._current())

    def _caller(self, peer_dns_name: str) -> Caller:
        caller = caller_of((peer_dns_name,), self._contract.job_uid)
        if caller is None:
            raise RefusedError(
                Refusal.NOT_MEMBER,
                (
                    f"{peer_dns_name!r} is not the name of the operator or of a worker of job "
                    f"{self._contract.job_uid}"
                ),
            )
        return caller


class BulkPeers:
    """Client of the other members' bulk servers."""

    def __init__(
        self,
        node: NodeTier,
        certificates: Certificates,
        peers: Peers,
        current: Callable[[], RoundState],
        throttle: Callable[[int], None],
    ) -> None:
        self._node = node
        self._certificates = certificates
        self._peers = peers
        self._current = current
        self._throttle = throttle

    def put(self, member: Member, round_: RestartRound, ref: ShardRef) -> int:
        """Copy a shard of this node to a member. It is durable there when this returns.

        Returns:
            The number of bytes that were sent.

        Raises:
            NotFoundError, CorruptionError: The shard on this node is missing or corrupt.
            HoldfastError: As `peer.client.send_copy`.
        """
        endpoint = self._peers.endpoint(member)
        with self._node.open_shard(ref) as reader:
            return send_copy(
                endpoint.host,
                endpoint.bulk_port,
                self._peers.server_name(member),
                self._certificates.client,
                round_,
                reader,
                options=replace(_options(self._current()), throttle=self._throttle),
            )

    def fetch(self, member: Member, ref: ShardRef) -> ShardRecord:
        """Fetch a shard from a member. It is verified and durable on this node when this returns.

        Raises:
            NotFoundError: The member does not have the shard.
            CorruptionError: The member's copy is corrupt.
            CapacityError: This node has no room.
            RefusedError, AccessDeniedError, UnavailableError: The member does not serve it.
        """
        endpoint = self._peers.endpoint(member)
        state = self._current()
        return fetch_shard(
            endpoint.host,
            endpoint.bulk_port,
            self._peers.server_name(member),
            self._certificates.client,
            state.round,
            ref,
            self._node.begin_copy,
            options=_options(state),
        )

    def open(
        self, member: Member, ref: ShardRef, *, attempts: int = _OPTIONS.attempts
    ) -> PeerShard:
        """Open a member's shard to read ranges of it.

        Raises:
            NotFoundError: The member does not have the shard.
            CorruptionError: The member's copy is corrupt.
            RefusedError, AccessDeniedError, UnavailableError: The member does not serve it.
        """
        endpoint = self._peers.endpoint(member)
        peer = Peer(
            endpoint.host,
            endpoint.bulk_port,
            self._peers.server_name(member),
            self._certificates.client,
            replace(_OPTIONS, attempts=attempts),
        )
        return PeerShard.open(peer, self._current().round, ref)

    def fetch_table(self, member: Member, ref: ShardRef) -> Trailer:
        """Fetch the chunk table of a member's shard, which is verified against the digest in `ref`.

        There is only one attempt. Raises what `open` raises.
        """
        with self.open(member, ref, attempts=1) as shard:
            return shard.trailer


def _options(state: RoundState) -> BulkOptions:
    return replace(_OPTIONS, plain=plain_copies(state))


def plain_copies(state: RoundState) -> bool:
    """Return whether payloads may travel outside TLS: there is a current ROUND, and its policy allows it."""
    return state.accepted is not None and state.accepted.policy.plain_copies
