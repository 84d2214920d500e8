"""The authorization of messages to a sidecar, over real mutual TLS."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from tests.support.servers.pki import Authority
from tests.support.sidecar import FakeOperator
from tests.support.sidecar.gang import Gangs

from holdfast_core.errors import RefusedError, UnavailableError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import JobUid, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    CopyReply,
    CopyRequest,
    Inventory,
    Ok,
    Refusal,
    ReportedShard,
    Seal,
    ShardInfo,
    WorkerReport,
    WorkerReports,
)
from holdfast_core.net import TlsFiles, client_context, operator_dns_name, peer_dns_name
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.peer.protocol import BulkOptions, Peer
from holdfast_core.peer.store import copy_shard

pytestmark = pytest.mark.integration


def caller(gang: Any, dns_name: str, authority: Authority | None = None) -> FakeOperator:
    """Return a client with a certificate for `dns_name`, of the job's CA or of another."""
    folder = gang.root / f"as-{dns_name}-{authority is None}"
    (authority or gang.authority).write_leaf(folder, dns_name)
    if authority is not None:
        (folder / "ca.crt").write_bytes(gang.authority.certificate_pem)
    context = client_context(TlsFiles.in_directory(folder))
    return FakeOperator(gang.operator.job_uid, context, gang.operator.members)


def report(worker: int) -> WorkerReport:
    digest = digest_of(b"")
    shard = ShardInfo(Rank(worker), 1, digest, digest)
    layout = LayoutDigests(digest, digest, digest)
    return WorkerReport(
        RestartRound(0),
        Worker(worker),
        shards=(ReportedShard(Step(9), RestartRound(0), shard, layout),),
    )


def reports(worker: int) -> WorkerReports:
    """Return the message in which a worker sends its own report."""
    one = report(worker)
    return WorkerReports(one.round, (one,))


@pytest.mark.fault("A pod of another tenant connects to a sidecar")
async def test_unauthenticated_callers_get_no_further_than_the_handshake_or_a_refusal(
    gangs: Gangs,
) -> None:
    async with gangs(2) as gang:
        await gang.start()
        uid = gang.operator.job_uid

        forged = caller(gang, operator_dns_name(uid), Authority())
        with pytest.raises(aiohttp.ClientError):
            await forged.inventory(0)

        other_job = caller(gang, operator_dns_name("another-job"))
        with pytest.raises(RefusedError) as refused:
            await other_job.inventory(0)
        assert refused.value.code == Refusal.NOT_MEMBER

        member = caller(gang, peer_dns_name("gpt-1-r0", uid))
        assert (await member.inventory(0)).worker == 0
        with pytest.raises(RefusedError) as refused:
            await member.seal(0, 7)
        assert refused.value.code == Refusal.NOT_MEMBER
        reply = await member.call(0, "/v1/report", reports(1), Ok)
        assert not reply.refused
        with pytest.raises(RefusedError) as refused:
            await member.call(0, "/v1/report", reports(0), Ok)
        assert refused.value.code == Refusal.NOT_MEMBER

        former = caller(gang, peer_dns_name("gpt-1-r9", uid))
        with pytest.raises(RefusedError) as refused:
            await former.inventory(0)
        assert refused.value.code == Refusal.NOT_MEMBER
        with pytest.raises(RefusedError) as refused:
            await former.call(0, "/v1/report", reports(1), Ok)
        assert refused.value.code == Refusal.NOT_MEMBER
        assert (await gang.operator.inventory(0)).round == 0


@pytest.mark.fault("A former member asks for shards")
@pytest.mark.fault("A pod of an older round sends old shards")
async def test_copies_are_taken_from_the_assigned_member_of_this_round_only(gangs: Gangs) -> None:
    async with gangs(2) as gang:
        gang.copies = ((0, 1),)
        await gang.start()
        await gang.commit(1, Level.LOCAL)
        uid = gang.operator.job_uid
        host, _, port = gang.operator.members[0].address.split(":")
        ref = (await gang.operator.inventory(0)).shards[0]
        tier = DiskNodeTier(gang.root / "elsewhere", capacity_bytes=1 << 30)
        tier.open()

        def owner(name: str) -> Peer:
            """Return the owner of the shard as the pod `name` addresses it."""
            context = caller(gang, peer_dns_name(name, uid)).context
            owner_name = peer_dns_name("gpt-0-r0", uid)
            return Peer(host, int(port), owner_name, context, BulkOptions())

        with pytest.raises(RefusedError) as refused:
            await asyncio.to_thread(copy_shard, owner("gpt-1-r9"), ref, tier)
        assert refused.value.code == Refusal.NOT_MEMBER
        await asyncio.to_thread(copy_shard, owner("gpt-1-r0"), ref, tier)

        first = caller(gang, peer_dns_name("gpt-0-r0", uid))
        second = caller(gang, peer_dns_name("gpt-1-r0", uid))
        reply = await first.call(1, "/v1/copy", CopyRequest(RestartRound(0), ref), CopyReply)
        assert reply.durable
        other_rank = replace(ref, rank=Rank(1))
        other_job = replace(ref, job_uid=JobUid("another-job"))
        for member, worker, request, code in (
            (second, 0, CopyRequest(RestartRound(0), other_rank), Refusal.NOT_ASSIGNED),
            (first, 1, CopyRequest(RestartRound(0), other_rank), Refusal.NOT_ASSIGNED),
            (first, 1, CopyRequest(RestartRound(0), other_job), Refusal.NOT_ASSIGNED),
            (first, 1, CopyRequest(RestartRound(1), ref), Refusal.FUTURE_ROUND),
        ):
            with pytest.raises(RefusedError) as refused:
                await member.call(worker, "/v1/copy", request, CopyReply)
            assert refused.value.code == code


@pytest.mark.fault("A replaced member reads on its old connection")
@pytest.mark.fault("A certificate is stolen")
async def test_a_member_that_is_replaced_reads_no_more(gangs: Gangs) -> None:
    """Reads are also refused while the next round is sealed, and on a connection that was opened before."""
    async with gangs(2) as gang:
        await gang.start()
        await gang.commit(1, Level.REPLICATED)
        uid = gang.operator.job_uid
        member = caller(gang, peer_dns_name("gpt-1-r0", uid))
        connector = aiohttp.TCPConnector(ssl=member.context)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def inventory() -> tuple[int, str]:
                host, control, _ = gang.operator.members[0].address.split(":")
                async with session.get(
                    f"https://{host}:{control}/v1/inventory",
                    server_hostname=peer_dns_name("gpt-0-r0", uid),
                ) as response:
                    return response.status, (await response.json()).get("code", "")

            assert await inventory() == (200, "")
            await gang.operator.seal(0, 1)
            assert await inventory() == (409, Refusal.SEALED)
            # Worker 1 gets a new pod in round 1.
            gang.lose(1)
            await gang.launch(1, 1)
            await gang.operator.round_all(gang.operator.message(1, copies=gang.copies))
            assert await inventory() == (409, Refusal.NOT_MEMBER)


HOSTILE = (
    b"",
    b"[]",
    b'{"round":"7"}',
    b'{"round":9223372036854775808}',
    b"[" * 100_000,
    b"\xff\xfe",
)


async def test_hostile_bodies_are_bad_requests(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        await gang.launch(0)
        member = gang.operator.members[0]
        host, control, _ = member.address.split(":")
        connector = aiohttp.TCPConnector(ssl=gang.operator.context)
        name = peer_dns_name(member.pod, gang.operator.job_uid)
        async with aiohttp.ClientSession(connector=connector) as session:
            for body in HOSTILE:
                address = f"https://{host}:{control}/v1/seal"
                async with session.post(address, data=body, server_hostname=name) as response:
                    assert response.status == 400, body[:40]
                    assert (await response.json())["code"] == Refusal.BAD_REQUEST
        await gang.operator.call(0, "/v1/seal", Seal(RestartRound(1)), Inventory)


async def test_the_client_refuses_an_address_that_is_another_pod(gangs: Gangs) -> None:
    """The address of worker 1 now belongs to worker 0's pod, which the client must not accept as worker 1."""
    async with gangs(2) as gang:
        for worker in (0, 1):
            await gang.launch(worker)
        members = gang.operator.members
        swapped = members[1].__class__(Worker(1), members[1].pod, members[0].address)
        gang.operator.members[1] = swapped
        with pytest.raises((aiohttp.ClientError, UnavailableError)):
            await gang.operator.inventory(1)
