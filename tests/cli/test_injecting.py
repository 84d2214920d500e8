"""`inject` disturbs a job only where a label permits it, and only what it names."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from kubernetes import client
from tests.support.hang import HANG_SECONDS

from holdfast_cli.cluster import ClusterClient
from holdfast_cli.errors import CommandError, NotFound, StateError, UsageError
from holdfast_cli.injecting import (
    Fault,
    Injection,
    PlannedFault,
    carry_out,
    obstacle_to_game_days,
    parse_kill,
    plan,
)
from holdfast_core.ids import JobUid
from holdfast_core.names import pod_name


def gang(phase: str = "Running", **meta: Any) -> dict[str, Any]:
    return {
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "uid": "u", **meta},
        "spec": {"workers": 2, "procsPerWorker": 4},
        "status": {"phase": phase, "members": [0, 1]},
    }


def pod(worker: int, birth: int, phase: str = "Running", **meta: Any) -> dict[str, Any]:
    name = pod_name("gpt", JobUid("u"), worker, birth)
    return {
        "metadata": {"name": name, "uid": f"uid-{worker}", **meta},
        "spec": {"nodeName": "n-1"},
        "status": {"phase": phase},
    }


PODS = [pod(0, 0), pod(1, 1)]


@pytest.mark.parametrize("labels", [None, {}, {"holdfast.dev/game-days": "no"}])
def test_a_namespace_without_the_label_is_left_alone(labels: dict[str, str] | None) -> None:
    obstacle = obstacle_to_game_days({"metadata": {"name": "team-a", "labels": labels}})
    assert "kubectl label namespace team-a holdfast.dev/game-days=allowed" in obstacle


def test_a_namespace_with_the_label_permits_game_days() -> None:
    labels = {"holdfast.dev/game-days": "allowed"}
    assert obstacle_to_game_days({"metadata": {"name": "team-a", "labels": labels}}) is None


def test_what_is_killed_is_named_by_kind_and_number() -> None:
    assert parse_kill("rank=12") == Injection(Fault.KILL_RANK, 12)
    assert parse_kill("pod=1") == Injection(Fault.KILL_POD, 1)
    for text in ("rank", "rank=-1", "node=1", "rank=2,3", "rank=1234567890"):
        with pytest.raises(UsageError, match="expected rank=N or pod=N"):
            parse_kill(text)


@pytest.mark.parametrize(
    ("fault", "number", "worker", "index", "container"),
    [
        (Fault.KILL_RANK, 6, 1, 2, "trainer"),
        (Fault.HANG_RANK, 3, 0, 3, "trainer"),
        (Fault.DELETE_POD, 1, 1, 0, "trainer"),
        (Fault.DRAIN_SIDECAR, 1, 1, 0, "holdfast-sidecar"),
    ],
)
def test_a_fault_goes_to_the_pod_of_its_rank_or_worker(
    fault: Fault, number: int, worker: int, index: int, container: str
) -> None:
    found = plan(gang(), PODS, Injection(fault, number))
    assert (found.worker, found.index, found.container) == (worker, index, container)
    assert found.pod == PODS[worker]["metadata"]["name"]
    assert found.pod in str(found) and "n-1" in str(found), "the question says what will happen"


@pytest.mark.fault("A game day is asked of a job that is over, or of a pod that does not run")
@pytest.mark.parametrize(
    ("job", "pods", "injection", "error", "words"),
    [
        (gang(), PODS, Injection(Fault.KILL_RANK, 8), NotFound, "has 8 ranks now"),
        (gang(), PODS, Injection(Fault.KILL_POD, 2), NotFound, "there is no worker 2"),
        (gang(), [pod(0, 0)], Injection(Fault.KILL_POD, 1), NotFound, "has no pod now"),
        (gang("Failed"), PODS, Injection(Fault.KILL_POD, 1), StateError, "gpt is Failed"),
        (
            gang(deletionTimestamp="now"),
            PODS,
            Injection(Fault.KILL_POD, 1),
            StateError,
            "being deleted",
        ),
        (
            gang(),
            [pod(0, 0, "Pending"), pod(1, 1, deletionTimestamp="now")],
            Injection(Fault.KILL_RANK, 0),
            StateError,
            "worker 0 is Pending",
        ),
        (
            gang(),
            [pod(0, 0), pod(1, 1, deletionTimestamp="now")],
            Injection(Fault.DELETE_POD, 1),
            StateError,
            "is being deleted: wait",
        ),
    ],
)
def test_what_cannot_be_disturbed_is_refused(
    job: dict[str, Any],
    pods: list[dict[str, Any]],
    injection: Injection,
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        plan(job, pods, injection)


class Cluster:
    """Runs commands of containers here, and records other requests."""

    namespace = "team-a"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def run_in(self, pod: str, container: str, command: tuple[str, ...]) -> tuple[int, str]:
        program = (sys.executable, *command[1:])
        ended = subprocess.run(
            program, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        return ended.returncode, ended.stdout + ended.stderr

    def ask(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        self.asked.append((*arguments, options))
        return {}


def planned(fault: Fault, number: int = 1) -> PlannedFault:
    return PlannedFault(Injection(fault, number), "gpt", 1, 0, "gpt-1", "uid-1", "n-1", "trainer")


@pytest.fixture
def rank() -> Any:
    """Return a process with the name of a rank, and a child of it, as a data loader has."""
    script = (
        "import ctypes, os, time\n"
        "ctypes.CDLL(None).prctl(15, b'holdfast-rank87', 0, 0, 0)\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process
    for pid in (child, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    process.stdout.close()


def test_the_process_of_a_rank_is_found_by_its_name_and_killed(rank: Any) -> None:
    said = carry_out(Cluster(), planned(Fault.KILL_RANK, 87))  # type: ignore[arg-type]
    assert f"process {rank.pid} of rank 87" in said, "and not its child, which has the same name"
    assert rank.wait(timeout=HANG_SECONDS) == -signal.SIGKILL


@pytest.mark.fault("A game day names a rank whose process is gone")
def test_a_rank_without_a_process_is_an_error() -> None:
    with pytest.raises(CommandError, match="no process of rank 86 runs here"):
        carry_out(Cluster(), planned(Fault.KILL_RANK, 86))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "call", "part"),
    [
        (Fault.KILL_POD, "CoreV1Api.delete_namespaced_pod", {"gracePeriodSeconds": 0}),
        (Fault.DELETE_POD, "CoreV1Api.delete_namespaced_pod", {}),
        (Fault.EVICT_POD, "CoreV1Api.create_namespaced_pod_eviction", {"kind": "Eviction"}),
    ],
)
def test_a_pod_is_deleted_once_and_only_if_it_is_still_the_same(
    fault: Fault, call: str, part: dict[str, Any]
) -> None:
    cluster = Cluster()
    carry_out(cluster, planned(fault))  # type: ignore[arg-type]
    ((name, pod, namespace, *rest),) = cluster.asked
    options = rest[-1]
    body = options.get("body") or rest[0]
    assert (name, pod, namespace, options["tries"]) == (call, "gpt-1", "team-a", 1)
    assert part.items() <= body.items()
    preconditions = body.get("preconditions") or body["deleteOptions"]["preconditions"]
    assert preconditions == {"uid": "uid-1"}


def played_exec(frames: list[bytes], refusal: bytes = b"") -> Any:
    """Serve one WebSocket that sends these frames of the protocol of `exec`, and return its listener."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            if refusal:
                connection.sendall(refusal)
                return
            key = re.search(rb"(?i)sec-websocket-key: (\S+)", head)
            digest = hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\nSec-WebSocket-Accept: "
                + base64.b64encode(digest)
                + b"\r\n\r\n"
            )
            for frame in frames:
                connection.sendall(b"\x82" + bytes([126]) + len(frame).to_bytes(2, "big") + frame)
            connection.sendall(b"\x88\x02\x03\xe8")
            connection.recv(4096)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def client_of(listener: Any) -> ClusterClient:
    configuration = type.__call__(client.Configuration)
    configuration.host = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return ClusterClient(client.ApiClient(configuration), "team-a", "here", configuration.host)


ENDED = b'{"status":"Failure","details":{"causes":[{"reason":"ExitCode","message":"3"}]}}'
NOT_STARTED = b'{"status":"Failure","message":"exec: \\"python3\\": executable file not found"}'


def test_a_command_in_a_container_has_an_exit_code_and_an_output() -> None:
    for verdict, code in ((b'{"status":"Success"}', 0), (ENDED, 3)):
        with played_exec([b"\x01said", b"\x02 this", b"\x03" + verdict]) as listener:
            ended = client_of(listener).run_in("gpt-0", "trainer", ("python3", "-c", "pass"))
        assert (ended[0], sorted(ended[1].split())) == (code, ["said", "this"])


@pytest.mark.fault("A command in a container is refused, or cannot be started")
def test_a_command_that_is_refused_or_never_starts_is_an_error() -> None:
    with played_exec([b"\x03" + NOT_STARTED]) as listener:
        with pytest.raises(CommandError, match="executable file not found"):
            client_of(listener).run_in("gpt-0", "trainer", ("python3",))
    body = b'{"kind":"Status","message":"pods \\"gpt-0\\" is forbidden"}'
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with played_exec([], refusal) as listener:
        with pytest.raises(CommandError, match=r'403.*"gpt-0" is forbidden'):
            client_of(listener).run_in("gpt-0", "trainer", ("python3",))
