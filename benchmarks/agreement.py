"""L5: what agreeing on saves costs a step, with many ranks.

The ranks are objects of this process and take turns. They share 32 connections to a TCPStore in another
process. Prints one JSON line:
 * step_microseconds: time that one step costs one rank's training thread, without a request.
 * requests_per_step: requests of the training threads to the store in these steps, of all ranks together.
 * poll_round_seconds: time until the store has answered one poll of every rank, and the period of the polls.
 * request: from a request to its save: seconds for the votes, and for reading the decision after the step.
 * store_read_per_step_seconds: for comparison, the time of a step in which every rank reads one key.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from holdfast.connection.session import Session
from holdfast.gang.agreement import Proposals, StepAgreement
from holdfast.gang.store import GangStore, open_store
from holdfast_core.ids import JobUid, Rank, RestartRound, Step
from holdfast_core.messages.schema import Plan

ROUND = RestartRound(0)
SECRET = b"secret of the benchmark"
STEPS = 100
CONNECTIONS = 32


class _Polled(Proposals):
    """Proposals that this program polls."""

    def start(self) -> None:
        """Start no thread: thousands of them would measure this process."""


class _Counted:
    """Client of the store that counts its requests."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._plain, name)

        def counted(*arguments: Any) -> Any:
            self.requests += 1
            return call(*arguments)

        return counted


def _serve(pipe: Connection) -> None:
    store = open_store("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    pipe.send(store.port)
    pipe.recv()


def measure(world_size: int, port: int) -> dict[str, Any]:
    from torch import distributed as untyped

    distributed: Any = untyped  # torch's stubs do not export its stores

    prefix = f"benchmark/{world_size}"
    plain = [
        _Counted(
            distributed.PrefixStore(
                prefix, open_store("127.0.0.1", port, is_master=False, use_libuv=False)
            )
        )
        for _ in range(min(world_size, CONNECTIONS))
    ]
    stores = [GangStore(plain[rank % CONNECTIONS], prefix, SECRET) for rank in range(world_size)]
    sessions = [Session(JobUid("job"), Rank(rank), ROUND) for rank in range(world_size)]
    proposals = [_Polled(store, world_size) for store in stores]
    ranks = [StepAgreement(*parts) for parts in zip(sessions, stores, proposals, strict=True)]
    for rank in ranks:
        rank.begin(0, 100)
    before = sum(client.requests for client in plain)
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        for rank in ranks:
            rank.after_step(step)
    step_seconds = (time.perf_counter() - began) / STEPS / world_size
    requests = (sum(client.requests for client in plain) - before) / STEPS

    began = time.perf_counter()
    for one in proposals:
        one.poll()
    poll_seconds = time.perf_counter() - began

    sessions[0].push(Plan(ROUND, save_from=Step(STEPS + 1)))
    ranks[0].after_step(STEPS + 1)
    began = time.perf_counter()
    for one in proposals:
        one.poll()
    vote_seconds = time.perf_counter() - began
    began = time.perf_counter()
    verdicts = [rank.after_step(10**9) for rank in ranks]
    decide_seconds = time.perf_counter() - began
    assert all(verdict.save for verdict in verdicts)

    began = time.perf_counter()
    for store in stores:
        store.read("at/0/1")
    read_seconds = time.perf_counter() - began
    return {
        "world_size": world_size,
        "step_microseconds": round(1e6 * step_seconds, 2),
        "requests_per_step": requests,
        "poll_round_seconds": round(poll_seconds, 4),
        "poll_period_seconds": proposals[0].period_seconds,
        "request": {
            "vote_seconds": round(vote_seconds, 3),
            "read_seconds": round(decide_seconds, 3),
        },
        "store_read_per_step_seconds": round(read_seconds, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 64, 1024, 4096])
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    server.start()
    try:
        port = ours.recv()
        for world_size in arguments.ranks:
            print(json.dumps(measure(world_size, port)))
    finally:
        ours.send(None)
        server.join()


if __name__ == "__main__":
    main()
