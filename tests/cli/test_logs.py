"""`logs` merges the logs of all ranks by time, follows pods that end and begin, and trusts no line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client
from tests.support.trainer.launched import until

from holdfast_cli.cluster import READ_TRIES, ClusterClient
from holdfast_cli.errors import NotFound, StateError, Unanswered, UsageError
from holdfast_cli.logs import (
    MAX_LINE_BYTES,
    JobLogs,
    LogLine,
    LogPosition,
    LogReader,
    Selection,
    WantedLogs,
    find_sources,
    nanoseconds,
    parse_steps,
    printable,
    split_lines,
)
from holdfast_core.ids import JobUid
from holdfast_core.names import pod_name

T0 = "2026-11-30T03:00:00.000000000Z"


def stamped(second: float, text: str) -> bytes:
    return f"2026-11-30T03:00:{second:012.9f}Z {text}".encode()


def read(reader: LogReader, *texts: str) -> list[LogLine]:
    found = [reader.read(stamped(n, text)) for n, text in enumerate(texts)]
    return [line for line in found if line is not None]


def test_each_line_has_its_rank_round_and_step() -> None:
    reader = LogReader(worker=1, ranks_of_pod=2, round=0)
    lines = read(
        reader,
        "[holdfast] round 3: forking ranks 2 to 3 of 4, from step 40",
        "[rank 2] step 41 loss 0.5",
        "[rank 2] Traceback (most recent call last):",
        "[rank 3] {'step': 41}",
        '[rank 3] {"step": 42, "loss": 0.25, "message": "trained", "time": "x"}',
        "[rank 0] of another pod",
    )
    assert [(line.source, line.round, line.step) for line in lines] == [
        ("worker 1", 3, None),
        ("rank 2", 3, 41),
        ("rank 2", 3, 41),
        ("rank 3", 3, 41),
        ("rank 3", 3, 42),
        ("worker 1", 3, None),
    ]
    assert str(lines[4]) == "[rank 3] step 42 trained loss=0.25"
    assert lines[5].text == "[rank 0] of another pod", "a rank of this pod cannot speak for others"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("step=12", 12),
        ("Step: 12/100", 12),
        ('"step" : 7', 7),
        ("epoch 3 step #9 done", 9),
        ("timestep 12", None),
        ("step 1.5", None),
        ("steps 12", None),
        ("a step forward", None),
    ],
)
def test_steps_in_plain_text(text: str, step: int | None) -> None:
    (line,) = read(LogReader(worker=0, ranks_of_pod=1), f"[rank 0] {text}")
    assert line.step == step


def test_the_log_of_a_sidecar_says_when_its_round_begins() -> None:
    reader = LogReader(worker=2, ranks_of_pod=8, is_sidecar=True, round=0)
    lines = read(
        reader,
        json.dumps({"message": "round begins", "round": 4, "step": 40, "level": "info"}),
        json.dumps({"message": "persisted", "round": 3, "step": 40, "level": "warning"}),
    )
    assert [(line.source, line.round) for line in lines] == [("sidecar 2", 4)] * 2
    assert lines[1].text == "step 40 warning persisted round=3"


def test_lines_before_the_first_round_are_told_apart_by_their_time() -> None:
    since = nanoseconds("2026-11-30T03:00:01Z")
    reader = LogReader(worker=0, ranks_of_pod=1, present_round=5, present_since_ns=since)
    assert [line.round for line in read(reader, "old", "new")] == [None, 5]


def test_a_selection_is_by_rank_round_and_step() -> None:
    line = LogLine(0, "rank 2", 2, 3, 41, "text")
    launcher = LogLine(0, "worker 1", None, 3, None, "text")
    assert Selection().has(line) and Selection().has(launcher)
    assert not Selection(ranks=frozenset({1})).has(line)
    assert Selection(round=3).has(line) and not Selection(round=2).has(line)
    assert Selection(round=2, is_followed=True).has(line)
    assert not Selection(round=4, is_followed=True).has(line)
    assert Selection(steps=(41, None)).has(line) and not Selection(steps=(None, 40)).has(line)
    assert not Selection(steps=(0, None)).has(launcher)


def test_ranges_of_steps() -> None:
    assert parse_steps("3..9") == (3, 9)
    assert (parse_steps("3.."), parse_steps("..9"), parse_steps("4")) == (
        (3, None),
        (None, 9),
        (4, 4),
    )
    for text in ("", "..", "9..3", "a..b", "-1", "1..2..3"):
        with pytest.raises(UsageError):
            parse_steps(text)


@pytest.mark.fault(
    "A script prints control characters, long lines, or what looks like another rank"
)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
        ("10%\r20%\r", "20%"),
        ("a\u202eb", "a\\u202eb"),
        ("\x9b31m", "\\x9b31m"),
        ("tab\tstays ü", "tab\tstays ü"),
    ],
)
def test_no_line_writes_to_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_are_cut_whatever_their_length() -> None:
    endless = (b"x" * 5000 for _ in range(1000))
    (line,) = split_lines(endless)
    assert len(line) < MAX_LINE_BYTES + 20 and line.endswith(b"(cut)")
    assert list(split_lines([b"a\nb", b"c\n", b"\nd"])) == [b"a", b"bc", b"", b"d"]


@pytest.mark.parametrize("raw", [b"", b"no time", b"\xff\xfe", b"2026-99-99T00:00:00Z x"])
def test_a_line_without_a_time_is_left_out(raw: bytes) -> None:
    assert LogReader(worker=0, ranks_of_pod=1).read(raw) is None


@pytest.mark.parametrize(
    "text", ["{" * 20_000, '{"step": true}', '{"step": -1}', '{"message": ', "{}"]
)
def test_broken_json_is_text(text: str) -> None:
    (line,) = read(LogReader(worker=0, ranks_of_pod=1), text)
    assert line.step is None


def test_a_log_that_is_opened_again_repeats_no_line() -> None:
    position = LogPosition()
    assert position.since_seconds() is None
    assert [position.passes(t) for t in (1, 2, 2)] == [True] * 3
    assert position.since_seconds() is not None
    assert [position.passes(t) for t in (1, 2, 2, 2, 3)] == [False, False, False, True, True]
    assert position.passes(1)  # the clock of the node was set back
    assert position.since_seconds() is not None
    assert [position.passes(t) for t in (1, 2)] == [False, True]


class Played:
    """API server with one job, whose pods have scripted logs."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {
            "phase": "Running",
            "restartRound": 0,
            "members": [0, 0],
            "conditions": [],
        }
        self.exists = True
        self.away = 0
        """Number of next reads of the job that are refused."""
        self.cut = 0
        """Number of next answers, other than logs, whose connection breaks before the last byte."""
        self.uid = "u"
        self.pods: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, list[Callable[[Any], None]]] = {}
        """For each pod, what happens at each request of its log. The last one repeats."""
        self.asked: list[dict[str, list[str]]] = []

    def add(self, worker: int, birth: int = 0, state: str = "running", restarts: int = 0) -> str:
        name = pod_name("gpt", JobUid("u"), worker, birth)
        states = (
            {state: {}} if state in ("running", "terminated") else {"waiting": {"reason": state}}
        )
        labels = {"holdfast.dev/worker": str(worker), "holdfast.dev/birth-round": str(birth)}
        self.pods[name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels},
            "spec": {},
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": "trainer",
                        "state": states,
                        "restartCount": restarts,
                        "ready": True,
                        "image": "",
                        "imageID": "",
                    }
                ],
            },
        }
        return name

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        if path.endswith("/trainingjobs/gpt") and self.exists:
            return {
                "kind": "TrainingJob",
                "metadata": {"name": "gpt", "namespace": "team-a", "uid": self.uid},
                "spec": {"workers": 2, "procsPerWorker": 2},
                "status": self.status,
            }
        if path.endswith("/pods"):
            return {"kind": "PodList", "apiVersion": "v1", "items": list(self.pods.values())}
        return None


def lines_of(*texts: bytes) -> Callable[[Any], None]:
    def write(out: Any) -> None:
        for text in texts:
            out(text + b"\n")

    return write


@pytest.fixture
def played() -> Iterator[Played]:
    found = Played()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            if parts.path.endswith("/log"):
                pod = parts.path.split("/")[-2]
                found.asked.append(query)
                scripts = found.logs.get(pod, [])
                if pod not in found.pods or not scripts:
                    return self.refuse(404, "no such pod")
                script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                script(self.chunk)
                self.chunk(b"")
                return None
            if found.away and parts.path.endswith("/trainingjobs/gpt"):
                found.away -= 1
                return self.refuse(503, "etcd has no leader")
            answer = found.answer(parts.path, query)
            if answer is None:
                return self.refuse(404, "not found")
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if found.cut:
                found.cut -= 1
                body, self.close_connection = body[:-1], True
            self.wfile.write(body)
            return None

        def chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def refuse(self, status: int, message: str) -> None:
            body = json.dumps({"kind": "Status", "code": status, "message": message}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{http.server_port}"  # type: ignore[attr-defined]
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def cluster(played: Played) -> ClusterClient:
    configuration = type.__call__(client.Configuration)
    configuration.host, configuration.retries = played.url, False  # type: ignore[attr-defined]
    return ClusterClient(client.ApiClient(configuration), "team-a", "here", configuration.host)


def shown(
    cluster: ClusterClient,
    notes: list[str] | None = None,
    found: list[str] | None = None,
    **options: Any,
) -> list[str]:
    """Return the lines that are shown. They are in `found` as soon as they are."""
    logs = JobLogs(cluster, WantedLogs("gpt", **options), ([] if notes is None else notes).append)
    found = [] if found is None else found

    def show(line: LogLine) -> None:
        found.append(str(line))

    (logs.follow if options.get("follow") else logs.show)(show)
    return found


@pytest.mark.fault("The connection to the API server breaks in the middle of an answer")
def test_an_answer_that_is_cut_is_read_again(played: Played, cluster: ClusterClient) -> None:
    name = played.add(0)
    played.cut = READ_TRIES - 1
    assert [pod["metadata"]["name"] for pod in cluster.pods("")] == [name]
    played.cut = READ_TRIES
    with pytest.raises(Unanswered, match="cannot be reached"):
        cluster.pods("")


def test_the_logs_of_all_pods_are_merged_by_time(played: Played, cluster: ClusterClient) -> None:
    first, second = played.add(0), played.add(1)
    played.logs[first] = [lines_of(stamped(1, "[rank 0] a"), stamped(4, "[rank 1] d"))]
    played.logs[second] = [lines_of(stamped(2, "[rank 2] b"), stamped(3, "[rank 3] c"))]
    assert shown(cluster) == ["[rank 0] a", "[rank 2] b", "[rank 3] c", "[rank 1] d"]
    assert shown(cluster, ranks=frozenset({3})) == ["[rank 3] c"]
    assert len(played.asked) == 3, "the pods of other ranks are not read"


def test_only_lines_of_the_present_round_are_shown(played: Played, cluster: ClusterClient) -> None:
    """The first pod has survived, and the second one is new."""
    played.status |= {"restartRound": 1, "members": [0, 1]}
    survivor, new = played.add(0), played.add(1, birth=1)
    begins = "[holdfast] round 1: forking ranks 0 to 1 of 4, from step 40"
    played.logs[survivor] = [
        lines_of(stamped(1, "[rank 0] old"), stamped(2, begins), stamped(5, "[rank 0] new"))
    ]
    played.logs[new] = [lines_of(stamped(3, "pulling torch"), stamped(4, "[rank 2] new"))]
    texts = [line.split("] ", 1)[1] for line in shown(cluster)]
    assert texts == [begins, "pulling torch", "new", "new"]
    assert shown(cluster, round=0) == ["[rank 0] old"]
    with pytest.raises(StateError, match="gpt is in round 1"):
        shown(cluster, round=2)


@pytest.mark.fault("A pod vanishes while its log is read")
def test_a_pod_that_vanishes_costs_only_its_own_lines(
    played: Played, cluster: ClusterClient
) -> None:
    gone, stays = played.add(0), played.add(1)
    played.logs[stays] = [lines_of(stamped(2, "[rank 2] b"))]
    notes: list[str] = []
    assert shown(cluster, notes) == ["[rank 2] b"]
    assert len(notes) == 1 and gone in notes[0]


def test_pods_that_have_no_log_yet_are_named(played: Played, cluster: ClusterClient) -> None:
    played.add(0, state="ImagePullBackOff")
    notes: list[str] = []
    with pytest.raises(StateError, match="none of its pods has a log now"):
        shown(cluster, notes)
    assert notes == [f"worker 0: pod {pod_name('gpt', JobUid('u'), 0, 0)}: ImagePullBackOff"]
    with pytest.raises(UsageError, match="has ranks 0 to 3"):
        shown(cluster, ranks=frozenset({4}))


@pytest.mark.fault("A pod ends, and a log breaks, while logs are followed")
def test_a_follower_survives_breaks_and_new_pods_and_ends_with_the_job(
    played: Played, cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_cli.logs._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("holdfast_cli.logs._SORT_SECONDS", 0.05)
    first = played.add(0)
    found: list[str] = []

    def breaks(out: Any) -> None:
        out(stamped(1, "[rank 0] a") + b"\n" + stamped(2, "[rank 0] b") + b"\n")
        raise ConnectionAbortedError

    def next_round(out: Any) -> None:
        lines_of(stamped(1, "[rank 0] a"), stamped(2, "[rank 0] b"), stamped(3, "[rank 0] c"))(out)
        until(lambda: "[rank 0] c" in found, "the last line of the first pod")
        del played.pods[first]
        second = played.add(0, birth=1)
        played.logs[second] = [ends]
        played.status |= {"restartRound": 1, "members": [1, 0]}

    def ends(out: Any) -> None:
        lines_of(stamped(9, "[rank 0] d"))(out)
        for pod in played.pods.values():
            pod["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
        played.status["conditions"] = [{"type": "Complete", "status": "True", "reason": "x"}]

    played.logs[first] = [breaks, next_round]
    assert shown(cluster, found=found, follow=True) == [f"[rank 0] {x}" for x in "abcd"]


@pytest.mark.fault("The API server is away for a time while logs are followed")
def test_a_follower_says_once_that_the_job_cannot_be_read(
    played: Played, cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_cli.logs._LOOK_SECONDS", 0)
    first = played.add(0)

    def ends_in_an_outage(out: Any) -> None:
        played.away = 3
        played.pods[first]["status"]["containerStatuses"][0]["state"] = {"terminated": {}}
        played.status["conditions"] = [{"type": "Complete", "status": "True", "reason": "x"}]
        lines_of(stamped(9, "[rank 0] a"))(out)

    played.logs[first] = [ends_in_an_outage]
    notes: list[str] = []
    assert shown(cluster, notes, follow=True) == ["[rank 0] a"]
    (note,) = notes
    assert note.startswith("the API server") and "(503): etcd has no leader" in note


def test_a_job_that_is_deleted_ends_a_follower(
    played: Played, cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_cli.logs._LOOK_SECONDS", 0.1)
    first = played.add(0)

    def goes(out: Any) -> None:
        lines_of(stamped(1, "[rank 0] a"))(out)
        played.exists = False

    played.logs[first] = [goes]
    with pytest.raises(NotFound, match="gpt was deleted meanwhile"):
        shown(cluster, follow=True)


@pytest.mark.fault(
    "A job is deleted and created again with the same name while its logs are followed"
)
def test_a_follower_does_not_go_on_with_another_job_of_the_name(
    played: Played, cluster: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_cli.logs._LOOK_SECONDS", 0.1)
    first = played.add(0)

    def is_replaced(out: Any) -> None:
        lines_of(stamped(1, "[rank 0] a"))(out)
        played.uid = "u2"
        played.status["conditions"] = [{"type": "Complete", "status": "True", "reason": "x"}]
        played.pods.clear()

    played.logs[first] = [is_replaced]
    with pytest.raises(NotFound, match="gpt was deleted meanwhile"):
        shown(cluster, follow=True)


@pytest.mark.fault("The clock of a node is set back while a rank writes its log")
def test_no_line_is_lost_when_the_clock_of_a_node_is_set_back(
    played: Played, cluster: ClusterClient
) -> None:
    played.logs[played.add(0)] = [
        lines_of(stamped(9, "[rank 0] a"), stamped(2, "[rank 0] b"), stamped(3, "[rank 0] c"))
    ]
    assert shown(cluster) == [f"[rank 0] {letter}" for letter in "abc"]


def test_more_pods_than_can_be_read_are_refused(played: Played, cluster: ClusterClient) -> None:
    played.status["members"] = [0] * 65
    for worker in range(65):
        played.add(worker)
    with pytest.raises(StateError, match="choose ranks with --rank"):
        shown(cluster)


def test_a_container_that_restarted_and_waits_still_has_a_log() -> None:
    played = Played()
    played.add(0, state="CrashLoopBackOff", restarts=2)
    gang = played.answer("/trainingjobs/gpt", {})
    (source,) = find_sources(gang, list(played.pods.values()), is_sidecar=False, ranks=None)
    assert (source.state, source.restarts, source.birth_round) == ("terminated", 2, 0)
