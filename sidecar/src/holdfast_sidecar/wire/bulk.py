"""Bulk connections between sidecars: what this one takes and gives, and copies to and from others.

Serving runs in the bulk server's threads; they only read the fencing state, which is replaced whole
and never changed in place. Calls block: run them in a pool.
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
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.rounds import Caller, RoundState, refuse_copy, refuse_reader
from holdfast_sidecar.wire.certificates import Certificates
from holdfast_sidecar.wire.client import Peers, raise_refused
from holdfast_sidecar.wire.server import caller_of

_OPTIONS = BulkOptions(attempts=2)
"""Few attempts: a caller that gets an error asks the next source, or comes back with backoff."""


class BulkServing:
    """BulkHandler: copies only from assigned members of the round that is held, reads for all of its
    members."""

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
        """`expected`, `dropped`: see ControlServer."""
        self._contract = contract
        self._node = node
        self._certificates = certificates
        self._current = current
        self._expected = expected
        self._dropped = dropped
        self._seldom = logs.Seldom()
        self._server: BulkServer | None = None

    def start(self, host: str, port: int) -> int:
        """Returns the port bound. Raises ConfigError."""
        self._server = BulkServer(
            self,
            self._node,
            self._certificates.server,
            host=host,
            port=port,
            expected=self._expected,
            dropped=self._drop,
        )
        self._server.start()
        return self._server.port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def authorize_put(
        self, peer_dns_name: str, round: RestartRound, ref: ShardRef, file_bytes: int
    ) -> None:
        """Raises StaleRoundError, RefusedError."""
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
        """Raises RefusedError for anybody but a member of the round that is held."""
        caller = self._caller(peer_dns_name)
        refused = refuse_reader(self._current(), caller)
        if refused is not None:
            raise_refused(refused)

    def allows_plain(self) -> bool:
        return plain_copies(self._current())

    def _drop(self, reason: str) -> None:
        self._dropped("bulk", reason)
        self._seldom.warning(reason, f"a bulk connection was closed: {reason}", port="bulk")

    def _caller(self, peer_dns_name: str) -> Caller:
        caller = caller_of((peer_dns_name,), self._contract.job_uid)
        if caller is None:
            raise RefusedError(
                Refusal.NOT_MEMBER,
                f"{peer_dns_name!r} names nobody of job {self._contract.job_uid}",
            )
        return caller


class BulkPeers:
    """Calls other members' bulk servers."""

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
        """Durable at the member when it returns: the bytes that were sent. Raises what
        peer.client.send_copy raises, and NotFoundError, CorruptionError for the own shard."""
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
        """Verified and durable on this node when it returns. Raises NotFoundError,
        CorruptionError (the member's copy is bad), UnavailableError, CapacityError."""
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
        """To read ranges of it. Raises NotFoundError, CorruptionError (the member's copy is bad),
        UnavailableError."""
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
        """What the chunks of a member's shard must be, bound to the digest in `ref`. Raises what
        `open` raises; at once where the member does not answer."""
        with self.open(member, ref, attempts=1) as shard:
            return shard.trailer


def _options(state: RoundState) -> BulkOptions:
    return replace(_OPTIONS, plain=plain_copies(state))


def plain_copies(state: RoundState) -> bool:
    """Payloads may travel outside TLS: the ROUND that is held says so. Not before there is one."""
    return state.held is not None and state.held.policy.plain_copies
