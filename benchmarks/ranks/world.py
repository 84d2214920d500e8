"""One gang: real sidecars with a scripted rank each, and the process that plays all other members."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.servers.pki import Authority
from tests.support.sidecar.local import FakeLauncher
from tests.support.sidecar.operator import FakeOperator
from tests.support.sidecar.processes import SidecarProcess
from tests.support.sidecar.ranks import FakeRank
from tests.support.sidecar.waiting import until

from benchmarks.ranks.gang import JOB_UID, PAYLOAD_BYTES, Gang, address_of, pod_name, small_layout
from benchmarks.ranks.watched import COUNTERS
from holdfast_core.contract import SidecarContract
from holdfast_core.ids import Level, RestartRound, Worker
from holdfast_core.messages.schema import CoordinatorState, Member, Policy, RestorePoint
from holdfast_core.net import TlsFiles, client_context, operator_dns_name

_KEEP_LAST = 4


class RealWorker:
    """A sidecar process that counts, with its launcher and its rank."""

    def __init__(self, gang: Gang, worker: int) -> None:
        self.worker = worker
        home = gang.folder / f"w{worker}"
        home.mkdir(parents=True)
        self._counters = home / "counters.json"
        pod = pod_name(worker, 0)
        contract = SidecarContract(
            job_uid=JOB_UID,
            job="gpt",
            namespace="bench",
            worker=Worker(worker),
            birth_round=RestartRound(0),
            procs_per_worker=1,
            shared_dir=str(home / "shared"),
            pod_name=pod,
            pod_ip="127.0.0.1",
            node_dir=str(home / "node"),
            node_capacity_bytes=1 << 30,
            certs_dir=str(gang.certificates(pod)),
            store_dir=str(home / "no-store"),
            store="",
            control_port=0,
            bulk_port=0,
            metrics_port=0,
        )
        self.sidecar = SidecarProcess(
            contract, home / "sidecar.log", module="benchmarks.ranks.watched"
        )
        self.launcher: FakeLauncher | None = None
        self.rank: FakeRank | None = None

    async def start(self) -> Member:
        self.sidecar.start({COUNTERS: str(self._counters)})
        address = await self.sidecar.address()
        return Member(Worker(self.worker), self.sidecar.contract.pod_name, address)

    async def train(self, round_: int) -> None:
        """Let the rank of this round start."""
        if self.launcher is None:
            path = self.sidecar.shared / "holdfast.sock"
            self.launcher = FakeLauncher(path, JOB_UID)
            await self.launcher.connect()
        await self.launcher.runs(round_)
        if self.rank is not None:
            self.rank.close()
        self.rank = FakeRank(
            self.sidecar.shared, JOB_UID, self.worker, round_, capacity_bytes=PAYLOAD_BYTES
        )
        await self.rank.connect()

    async def save(self, step: int) -> None:
        assert self.rank is not None
        data = random.Random(step * 10_000 + self.worker).randbytes(PAYLOAD_BYTES)
        await self.rank.save(step, data, small_layout(self.worker).to_bytes())
        self.rank.progress(step)

    async def reached(self, step: int, level: Level) -> None:
        assert self.rank is not None
        await self.rank.reached(step, level)

    async def take(self) -> dict[str, Any]:
        """Return the counters since the last call."""
        assert self.sidecar.process is not None
        self._counters.unlink(missing_ok=True)
        self.sidecar.process.send_signal(signal.SIGUSR1)
        await until(self._counters.exists, f"counters of worker {self.worker}")
        taken: dict[str, Any] = json.loads(self._counters.read_text())
        return taken

    def close(self) -> None:
        for client in (self.launcher, self.rank):
            if client is not None:
                client.close()
        self.sidecar.kill()


class World:
    """The gang. The context manager ends its processes."""

    def __init__(self, folder: Path, workers: int, state: str, port: int) -> None:
        folder.mkdir(parents=True)
        self.gang = Gang(folder, workers, (0, workers // 2), port, state=state)
        self._authority = Authority()
        self._key = ec.generate_private_key(ec.SECP256R1())
        for worker in range(workers):
            self._certify(worker, 0)
        self.gang.write()
        operator = self._authority.write_leaf(folder / "operator", operator_dns_name(JOB_UID))
        self.operator = FakeOperator(JOB_UID, client_context(TlsFiles.in_directory(operator)))
        self.real = [RealWorker(self.gang, worker) for worker in self.gang.real]
        self._played: asyncio.subprocess.Process | None = None

    def _certify(self, worker: int, birth_round: int) -> None:
        pod = pod_name(worker, birth_round)
        certificate, key = self._authority.leaf(self.gang.server_name(pod), key=self._key)
        directory = self.gang.certificates(pod)
        directory.mkdir(parents=True)
        for name, data in (
            ("ca.crt", self._authority.certificate_pem),
            ("tls.crt", certificate),
            ("tls.key", key),
        ):
            (directory / name).write_bytes(data)

    def _member(self, worker: int, birth_round: int) -> Member:
        address = f"{address_of(worker)}:{self.gang.port}:{self.gang.port}"
        return Member(Worker(worker), pod_name(worker, birth_round), address)

    async def __aenter__(self) -> Self:
        self._played = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.ranks.members",
            str(self.gang.folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._line()
        for worker in self.gang.played:
            self.operator.members[worker] = self._member(worker, 0)
        for real in self.real:
            self.operator.members[real.worker] = await real.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for real in self.real:
            real.close()
        if self._played is not None and self._played.returncode is None:
            self._played.kill()
            await self._played.wait()

    async def _line(self) -> dict[str, Any]:
        assert self._played is not None and self._played.stdout is not None
        line = await self._played.stdout.readline()
        if not line:
            raise SystemExit("the process that plays the members has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    async def play(self, **command: Any) -> dict[str, Any]:
        """Let the played members carry out a command, and wait until they have."""
        assert self._played is not None and self._played.stdin is not None
        self._played.stdin.write(json.dumps(command).encode() + b"\n")
        return await self._line()

    async def begin(
        self, round_: int, restore: RestorePoint | None = None, replaced: tuple[int, ...] = ()
    ) -> None:
        """Start a round on the real sidecars, and let the played members report to its coordinator."""
        for worker in replaced:
            self._certify(worker, round_)
            self.operator.members[worker] = self._member(worker, round_)
        await self.play(do="replace", round=round_, workers=replaced)
        workers = self.gang.workers
        first, second = self.gang.real
        copies = [(first, second), (second, first)]
        copies += [(w, (w + 1) % workers) for w in self.gang.played]
        message = self.operator.message(
            round_,
            restore=restore,
            copies=tuple(copies),
            policy=Policy(interval_steps=1, peer_copies=1, keep_last=_KEEP_LAST),
            coordinator=first,
            store_host=first,
        )
        await asyncio.gather(*(self.operator.round(r.worker, message) for r in self.real))
        await asyncio.gather(
            self.play(
                do="round",
                round=round_,
                version=1,
                real=[self._reached_at(real.worker) for real in self.real],
            ),
            *(real.train(round_) for real in self.real),
        )

    def _reached_at(self, worker: int) -> list[Any]:
        host, control, _ = self.operator.members[worker].address.split(":")
        return [worker, host, int(control)]

    async def commit(self, step: int) -> dict[str, Any]:
        """Let all ranks save a step. Return what the played members measured once it is replicated."""
        playing = asyncio.create_task(self.play(do="commit", step=step))
        await asyncio.gather(*(real.save(step) for real in self.real))
        played = await playing
        for real in self.real:
            await real.reached(step, Level.REPLICATED)
        return played

    async def seal(self, round_: int) -> list[float]:
        """Seal the real sidecars, and return how long each took to answer with its inventory."""

        async def one(worker: int) -> float:
            began = time.monotonic()
            await self.operator.seal(worker, round_)
            return time.monotonic() - began

        return list(await asyncio.gather(*(one(real.worker) for real in self.real)))

    async def state(self) -> CoordinatorState:
        return await self.operator.state(self.gang.real[0])

    async def running(self) -> CoordinatorState:
        """Wait until every rank has finished a step of this round."""
        first = self.gang.real[0]
        return await self.operator.state_until(first, lambda s: s.running, "all ranks train")
