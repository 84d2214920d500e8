"""Node 0 and the nodes that join it: who is admitted, and what ends each wait. The connections are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.support.servers.ports import free_port

from holdfast.launcher.command_line.node_options import NodeOptions
from holdfast.launcher.nodes import messages
from holdfast.launcher.nodes.link import NodeLink, run_key, store_secret
from holdfast.launcher.nodes.members import Failure, Members
from holdfast.launcher.nodes.messages import (
    Alive,
    EndRound,
    Join,
    Joined,
    Leave,
    RankExited,
    Refused,
    RoundEnded,
    StartRound,
    Stop,
)
from holdfast_core.errors import ConfigError, FormatError, UnavailableError
from holdfast_core.ids import Rank, RestartRound

RANKS = 2
START = StartRound(RestartRound(0), 1234, "salt", 3)


class Stops:
    def __init__(self) -> None:
        self.count = 0
        self.arrived = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.arrived.set()


@contextlib.asynccontextmanager
async def node_0(options: NodeOptions, stops: Stops | None = None) -> AsyncIterator[Members]:
    members = Members(options, RANKS, stops or Stops())
    await members.open()
    try:
        yield members
    finally:
        await members.leave(0, "the test has ended")


@contextlib.asynccontextmanager
async def connected(options: NodeOptions) -> AsyncIterator[NodeLink]:
    """An authenticated connection to node 0 that has sent nothing yet."""
    reader, writer = await asyncio.open_connection("localhost", options.port)
    link = await NodeLink.open(reader, writer, run_key(options), leads=False)
    try:
        yield link
    finally:
        link.close()


@contextlib.asynccontextmanager
async def joined(options: NodeOptions, last_round: int | None = None) -> AsyncIterator[NodeLink]:
    async with connected(options) as link:
        round_ = None if last_round is None else RestartRound(last_round)
        link.send(Join(options.rank, options.count, RANKS, "there", round_))
        assert await link.receive() == Joined()
        yield link


def nodes(count: int = 2, join_seconds: float = 60.0) -> list[NodeOptions]:
    """Return the options of each node."""
    one = NodeOptions(count, 0, "localhost", free_port(), "run", join_seconds, "token")
    return [replace(one, rank=rank) for rank in range(count)]


async def test_a_round_succeeds_when_all_ranks_of_all_nodes_returned_0() -> None:
    own, other = nodes()
    async with node_0(own) as members, joined(other) as link:
        await members.gather()
        members.start(START)
        assert await link.receive() == START
        waiting = asyncio.ensure_future(members.failure())
        for rank in (2, 3):
            link.send(RankExited(START.round, Rank(rank), 0))
        assert await waiting is None
        assert members.next_round == 1


@pytest.mark.parametrize(
    ("code", "exit_code"), [pytest.param(7, 7, id="code"), pytest.param(-9, 137, id="signal")]
)
async def test_the_first_rank_that_fails_ends_the_round(code: int, exit_code: int) -> None:
    own, other = nodes()
    async with node_0(own) as members, joined(other) as link:
        members.start(START)
        await link.receive()
        link.send(RankExited(START.round, Rank(3), code))
        assert await members.failure() == Failure(f"rank 3 ended with code {code}", exit_code)
        ending = asyncio.ensure_future(members.end(START.round))
        assert await link.receive() == EndRound(START.round)
        assert not ending.done()
        link.send(RoundEnded(START.round))
        await ending


async def test_the_end_of_a_rank_of_an_older_round_does_not_count() -> None:
    own, other = nodes()
    async with node_0(own) as members, joined(other) as link:
        members.start(START)
        members.start(replace(START, round=RestartRound(1)))
        link.send(RankExited(START.round, Rank(3), 9))
        link.send(RankExited(RestartRound(1), Rank(2), 5))
        assert await members.failure() == Failure("rank 2 ended with code 5", 5)


async def test_a_node_whose_connection_ends_is_lost_and_may_join_again() -> None:
    own, other = nodes()
    async with node_0(own) as members:
        async with joined(other) as link:
            members.start(START)
            await link.receive()
        failure = await members.failure()
        assert failure == Failure("the connection to node 1 (there) ended", 1)
        await members.end(START.round)  # its ranks cannot be waited for
        async with joined(other, last_round=0):
            await members.gather()
            assert members.next_round == 1


async def test_a_round_that_begins_without_a_node_fails_at_once() -> None:
    own, *others = nodes(3)
    async with node_0(own) as members, joined(others[0]) as link:
        members.start(START)
        failure = await members.failure()
        assert failure is not None
        assert "before the ranks were forked" in failure.what
        assert await link.receive() == START


async def test_a_new_node_0_counts_on_from_the_rounds_of_the_others() -> None:
    own, *others = nodes(3)
    async with node_0(own) as members, joined(others[0], 4), joined(others[1], 2):
        await members.gather()
        assert members.next_round == 5


async def test_nodes_that_do_not_join_end_the_wait() -> None:
    own, *_ = nodes(3, join_seconds=0.05)
    async with node_0(own) as members:
        with pytest.raises(UnavailableError, match="nodes 1, 2 of 3 nodes did not join"):
            await members.gather()


@pytest.mark.parametrize(
    ("join", "reason", "may_retry"),
    [
        pytest.param(Join(1, 3, RANKS, "b"), "it has --nnodes 3", False, id="nodes"),
        pytest.param(Join(1, 2, 8, "b"), "it starts 8 ranks", False, id="ranks"),
        pytest.param(Join(0, 2, RANKS, "b"), "its --node-rank is 0", False, id="node-0"),
        pytest.param(Join(2, 2, RANKS, "b"), "its --node-rank is 2", False, id="node-rank"),
    ],
)
async def test_a_node_that_does_not_fit_is_refused(
    join: Join, reason: str, may_retry: bool
) -> None:
    own, other = nodes()
    async with node_0(own), connected(other) as link:
        link.send(join)
        reply = await link.receive()
        assert isinstance(reply, Refused)
        assert reason in reply.reason
        assert reply.may_retry is may_retry


async def test_a_second_launcher_of_a_node_waits_for_the_end_of_the_first() -> None:
    own, other = nodes()
    async with node_0(own) as members:
        async with joined(other), connected(other) as second:
            second.send(Join(1, 2, RANKS, "there"))
            reply = await second.receive()
            assert isinstance(reply, Refused)
            assert reply.may_retry
        members.start(START)
        async with joined(other):
            await members.gather()


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"run_id": "other"}, id="run"), pytest.param({"token": ""}, id="token")],
)
async def test_a_launcher_without_the_key_of_the_run_is_not_heard(changes: dict[str, str]) -> None:
    own, other = nodes()
    stops = Stops()
    async with (
        node_0(own, stops) as members,
        connected(replace(other, **changes)) as stranger,  # type: ignore[arg-type]
        joined(other) as link,
    ):
        stranger.send(Join(1, 2, RANKS, "there"))
        stranger.send(Stop())
        with pytest.raises(UnavailableError, match="it closed the connection"):
            await stranger.receive()
        assert stops.count == 0
        members.start(START)
        assert await link.receive() == START


async def test_a_frame_that_was_recorded_is_not_valid_on_another_connection() -> None:
    own, other = nodes()
    key = run_key(other)
    recorded = b""
    async with node_0(own):
        for attempt in range(2):
            reader, writer = await asyncio.open_connection("localhost", own.port)
            if attempt == 0:
                taps = _Tap(writer)
                link = await NodeLink.open(reader, taps, key, leads=False)  # type: ignore[arg-type]
                link.send(Join(1, 2, RANKS, "there"))
                assert await link.receive() == Joined()
                recorded = taps.written
            else:
                writer.write(recorded)
                await reader.readexactly(len(b"holdfast run 1\n") + 16)
                assert await reader.read() == b""
            writer.close()


class _Tap:
    """A writer that keeps what it writes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data
        self._writer.write(data)

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", id="another-protocol"),
        pytest.param(b"holdfast run 9\n" + bytes(16), id="another-release"),
        pytest.param(b"holdfast run 1\n" + bytes(16) + b"\xff" * 36, id="huge-frame"),
        pytest.param(b"", id="nothing"),
    ],
)
async def test_what_is_no_launcher_is_closed_and_disturbs_no_other(data: bytes) -> None:
    own, other = nodes()
    async with node_0(own) as members:
        reader, writer = await asyncio.open_connection("localhost", own.port)
        writer.write(data)
        writer.write_eof()
        await reader.read()
        writer.close()
        async with joined(other):
            await members.gather()


async def test_a_signal_on_one_node_reaches_all_others() -> None:
    own, *others = nodes(3)
    stops = Stops()
    async with node_0(own, stops) as members, joined(others[0]) as one, joined(others[1]) as two:
        one.send(Stop())
        await stops.arrived.wait()
        members.stop()
        assert await two.receive() == Stop()


async def test_the_end_of_a_node_that_was_asked_to_stop_is_no_failure() -> None:
    own, other = nodes()
    async with node_0(own) as members:
        async with joined(other) as link:
            members.start(START)
            members.stop()
            assert await link.receive() == START
        assert await members.failure() is None


async def test_leave_reaches_every_node_with_the_code() -> None:
    own, other = nodes()
    async with node_0(own) as members, joined(other) as link:
        leaving = asyncio.ensure_future(members.leave(137, "no restarts are left"))
        assert await link.receive() == Leave(137, "no restarts are left")
        link.close()
        await leaving


async def test_a_port_that_is_in_use_is_named() -> None:
    own, _ = nodes()
    async with node_0(own):
        with pytest.raises(ConfigError, match=f"cannot listen on port {own.port}"):
            await Members(own, RANKS, Stops()).open()


async def test_silence_ends_a_connection() -> None:
    own, other = nodes()
    async with node_0(own), joined(other) as link:
        with pytest.raises(UnavailableError, match="nothing arrived"):
            await link.receive(silence_seconds=0.05)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[]", id="empty"),
        pytest.param(b'["Run", {}]', id="unknown"),
        pytest.param(b'[["Join"], {}]', id="list"),
        pytest.param(b'["Leave", {"code": -9, "reason": ""}]', id="code"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"\xff", id="not-text"),
    ],
)
def test_a_message_that_is_not_valid_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        messages.decode(body)


def test_messages_survive_the_wire() -> None:
    for message in (START, Join(1, 2, 3, "h", RestartRound(4)), Alive(), Leave(3, "why")):
        assert messages.decode(messages.encode(message)) == message


def test_the_secret_of_a_store_follows_from_run_token_and_salt() -> None:
    own, other = nodes()
    secret = store_secret(run_key(own), "salt")
    assert secret == store_secret(run_key(other), "salt")
    assert secret != store_secret(run_key(own), "pepper")
    assert secret != store_secret(run_key(replace(own, token="")), "salt")
    assert secret != store_secret(run_key(replace(own, run_id="runtoken", token="")), "salt")
