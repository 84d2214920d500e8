"""The socket and the hooks of a pod, on a real sidecar process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from tests.support.sidecar import DEADLINE_SECONDS, FakeRank
from tests.support.sidecar.gang import Gangs

from holdfast_core.errors import NotFoundError, RefusedError
from holdfast_core.ids import Digest, JobUid, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import Ok, Refusal, Stage
from holdfast_core.shm.slot_file import SlotState

pytestmark = pytest.mark.integration

NO_LAYOUT = Digest("b3:" + "9" * 64)


async def refusal(rank: FakeRank, message: Stage) -> Refusal:
    with pytest.raises((RefusedError, NotFoundError)) as refused:
        await rank.request(message)
    return Refusal(getattr(refused.value, "code", Refusal.NOT_FOUND))


async def test_a_stage_that_contradicts_its_slot_is_refused_and_the_slot_left_alone(
    gangs: Gangs,
) -> None:
    async with gangs(1) as gang:
        await gang.start()
        rank: FakeRank = gang.ranks[0]
        name = rank.names[0]
        rank.fill_slot(name, 5, b"data")
        good = rank.stage_message(name, 5, b"data")
        for bad in (
            replace(good, step=Step(6)),
            replace(good, payload_bytes=3),
            replace(good, payload_bytes=1 << 40),
            replace(good, rank=Rank(1)),
            replace(good, slot="rank000001.0.slot"),
            replace(good, slot="../../etc/passwd"),
            replace(good, layout=NO_LAYOUT),
            replace(good, round=RestartRound(1)),
        ):
            code = await refusal(rank, bad)
            assert code in (
                Refusal.BAD_REQUEST,
                Refusal.NOT_FOUND,
                Refusal.FUTURE_ROUND,
            ), bad
            assert rank.header(name).state is SlotState.FULL, bad
        await rank.request(good)
        await rank.reached(5, Level.LOCAL)
        assert rank.header(name).state is SlotState.FREE
        assert await rank.request(good) == Ok(RestartRound(0)), "it is stored"
        other = replace(good, payload_bytes=3)
        assert await refusal(rank, other) is Refusal.BAD_REQUEST, "no save of these bytes is stored"


async def test_ranks_of_another_job_or_another_pod_are_refused(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        await gang.start()
        shared = gang.sidecars[0].shared
        for stranger in (
            FakeRank(shared, JobUid("another-job"), 0, 0),
            FakeRank(shared, gang.operator.job_uid, 7, 0),
        ):
            with pytest.raises(RefusedError) as refused:
                await stranger.connect()
            assert refused.value.code == Refusal.BAD_REQUEST
            stranger.close()
        assert (shared / "holdfast.sock").stat().st_mode & 0o777 == 0o660


async def test_invalid_bytes_on_the_socket_end_only_their_connection(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        await gang.start()
        path = str(gang.sidecars[0].shared / "holdfast.sock")
        for rubbish in (b"\xff\xff\xff\xff", b"\0\0\0\x02{]", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(rubbish)
            assert await asyncio.wait_for(reader.read(), DEADLINE_SECONDS) == b""
            writer.close()
        await gang.commit(1, Level.LOCAL)


def hook(gang: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast_sidecar", *arguments],
        env={**os.environ, **gang.sidecars[0].contract.to_env()},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


async def test_the_startup_probe_waits_for_the_sidecar(gangs: Gangs) -> None:
    """The kubelet writes a warning for each probe that fails, also at a start that is healthy."""
    async with gangs(1) as gang:
        await gang.start()
        gang.sidecars[0].kill()
        probe = asyncio.create_task(asyncio.to_thread(hook, gang, "healthz", "--timeout", "100"))
        await gang.relaunch(0)
        assert (await probe).returncode == 0


async def test_the_sidecar_starts_by_an_exec(gangs: Gangs) -> None:
    async with gangs(1) as gang:
        await gang.start()
        gang.sidecars[0].kill()
        gang.sidecars[0].executed = True
        await gang.relaunch(0)
        assert (await asyncio.to_thread(hook, gang, "healthz")).returncode == 0


async def test_probes_hooks_and_the_end(gangs: Gangs) -> None:
    """healthz, metrics, and pre-stop while a rank runs and after it. After SIGTERM, healthz fails."""
    async with gangs(1) as gang:
        await gang.start()
        await gang.commit(1, Level.LOCAL)
        assert (await asyncio.to_thread(hook, gang, "healthz")).returncode == 0
        ports = json.loads((gang.sidecars[0].node / "ports.json").read_text())
        text = await asyncio.to_thread(read, f"http://127.0.0.1:{ports['metrics']}/metrics")
        assert 'holdfast_checkpoint_bytes_total{tier="node"} 100001.0' in text
        assert "holdfast_restart_round 0.0" in text
        assert "holdfast_background_limit_bytes_per_second 0.0" in text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(read, f"http://127.0.0.1:{ports['metrics']}/flushed")
        busy = await asyncio.to_thread(hook, gang, "pre-stop", "--timeout", "0.5")
        assert busy.returncode == 0
        assert "some checkpoints were not safe" in busy.stderr
        gang.launchers.pop(0).close()
        idle = await asyncio.to_thread(hook, gang, "pre-stop", "--timeout", "100")
        assert (idle.returncode, idle.stderr) == (0, "")
        process = gang.sidecars[0].process
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, DEADLINE_SECONDS) == 0
        ended = await asyncio.to_thread(hook, gang, "healthz", "--timeout", "0")
        assert ended.returncode == 1
        assert "holdfast.sock" in ended.stderr


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as response:
        return str(response.read().decode())


def test_a_wrong_environment_is_reported_by_name() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast_sidecar"],
        env={k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert ended.returncode == 2
    assert "HOLDFAST_JOB_UID is not set" in ended.stderr
