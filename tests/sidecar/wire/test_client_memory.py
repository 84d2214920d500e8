"""How much of a large message a sidecar buffers for members that read it slowly."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path

from tests.support.hang import HANG_SECONDS
from tests.support.servers.pki import Authority
from tests.support.sidecar.contracts import contract_with
from tests.support.sidecar.rounds import accepted, round_message

from holdfast_core.ids import Worker
from holdfast_core.messages.schema import FinishCommit
from holdfast_core.net import TlsFiles, client_context, peer_dns_name, server_context
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.verbs import PATHS

MIB = 1 << 20
RECEIVERS = 8


class StoppedServer:
    """Server whose connections read the first bytes of a request and then stop to read."""

    def __init__(self) -> None:
        self.began = asyncio.Semaphore(0)
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.began.release()
        await self.ended.wait()
        writer.close()


async def test_a_body_for_slow_members_is_buffered_in_pieces(tmp_path: Path) -> None:
    """TLS would hold a copy of the body for each of them: a manifest of 4,096 ranks took 250 MiB."""
    contract = contract_with()
    authority = Authority()
    message = round_message(workers=2)
    pod = message.members[1].pod
    name = peer_dns_name(pod, contract.job_uid)
    files = TlsFiles.in_directory(authority.write_leaf(tmp_path, name))
    stopped = StoppedServer()
    server = await asyncio.start_server(stopped.serve, "127.0.0.1", 0, ssl=server_context(files))
    port = server.sockets[0].getsockname()[1]
    members = tuple(replace(m, address=f"127.0.0.1:{port}:{port}") for m in message.members)
    state = accepted(replace(message, members=members))
    peers = Peers(contract, client_context(files), lambda: state, call_seconds=HANG_SECONDS)

    async def refuse(*_: object) -> None:
        raise AssertionError("a message to another worker was dispatched")

    await peers.start(refuse)
    body = bytes(8 * MIB)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        calls = [
            asyncio.create_task(peers.exchange(Worker(1), PATHS[FinishCommit], None, body))
            for _ in range(RECEIVERS)
        ]
        for _ in range(RECEIVERS):
            await stopped.began.acquire()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stopped.ended.set()
    await asyncio.gather(*calls, return_exceptions=True)
    await peers.close()
    server.close()
    assert peak - before < RECEIVERS * 2 * MIB
