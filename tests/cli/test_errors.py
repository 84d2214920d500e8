"""If a command cannot do its work, it prints one sentence with the next step, and its exit code says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR
from threading import Barrier, Thread
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.operator.builders import UID, checkpoint, job, status
from tests.support.servers.ports import closed_port

from holdfast_cli import program
from holdfast_cli.cluster import ClusterClient
from holdfast_cli.errors import CommandError
from holdfast_cli.gangs import MemberPod
from holdfast_cli.program import VERBS
from holdfast_cli.status import newest_steps
from holdfast_core.api import LineageEntry
from holdfast_core.ids import JobUid, RestartRound, Step
from holdfast_core.names import pod_name


@dataclass
class ApiServer:
    """An API server that gives one answer to all requests of a method."""

    url: str
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and body by method, or by method and the end of the path."""
    paths: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    """Bodies of the PATCH requests."""
    drops: dict[str, int] = field(default_factory=dict)
    """Number of next requests whose connections are closed without an answer, by method."""
    away: dict[str, int] = field(default_factory=dict)
    """Number of next requests that are refused with 503, by the end of the path."""

    def answer(self, body: Mapping[str, Any]) -> None:
        self.answers["GET"] = 200, json.dumps(body)

    def refuse(self, status: int, message: str, method: str = "GET") -> None:
        body = {"kind": "Status", "code": status, "message": message}
        self.answers[method] = status, json.dumps(body)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.paths.append(self.path)
            if found.drops.get(self.command):
                found.drops[self.command] -= 1
                self.connection.shutdown(SHUT_RDWR)
                self.close_connection = True
                return
            path = self.path.partition("?")[0]
            away = next(
                (end for end, left in found.away.items() if left and path.endswith(end)), None
            )
            if away is not None:
                found.away[away] -= 1
                self.send_error(503)
                return
            asked = (key for key in found.answers if f"{self.command} {path}".endswith(key))
            status, text = found.answers[next(asked, self.command)]
            body = text.encode()
            self.send_response(status)
            is_json = text.startswith("{")
            self.send_header("Content-Type", "application/json" if is_json else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET

        def do_PATCH(self) -> None:
            length = int(self.headers["Content-Length"])
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            found.bodies.append(json.loads(self.rfile.read(length)))
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = ApiServer(f"http://127.0.0.1:{http.server_port}")
    found.answer({"items": []})
    thread = Thread(target=http.serve_forever)
    thread.start()
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


def kubeconfig(
    path: Path, server: str, namespaces: Mapping[str, str | None], active: str | None
) -> Path:
    """Write a kubeconfig with one context for each entry of `namespaces`."""
    contexts = []
    for name, namespace in namespaces.items():
        context = {"cluster": "c", "user": "u"}
        if namespace is not None:
            context["namespace"] = namespace
        contexts.append({"name": name, "context": context})
    document: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": contexts,
    }
    if active is not None:
        document["current-context"] = active
    path.write_text(json.dumps(document))
    return path


def run(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast_cli", *arguments],
        env={**os.environ, "KUBECONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def complaint(config: Path, *arguments: str, code: int = 1) -> str:
    """Return the one line that a failed command prints."""
    ended = run(config, *arguments)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kubectl holdfast: ")
    return line


@pytest.fixture
def config(tmp_path: Path, server: ApiServer) -> Path:
    contexts = {"here": "team-a", "there": "team-b", "plain": None}
    return kubeconfig(tmp_path / "config", server.url, contexts, "here")


@pytest.mark.fault("The CLI is given another context")
@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [
        ([], "team-a"),
        (["--context", "there"], "team-b"),
        (["--context", "plain"], "default"),
        (["--context", "there", "-n", "team-c"], "team-c"),
    ],
)
def test_requests_go_to_the_namespace_of_the_context(
    server: ApiServer, config: Path, arguments: list[str], namespace: str
) -> None:
    """The options stand before or after the verb, as those of kubectl."""
    assert run(config, *arguments, "list").returncode == 0
    assert run(config, "list", *arguments).returncode == 0
    path = f"/apis/holdfast.dev/v1alpha1/namespaces/{namespace}/checkpoints"
    assert server.paths == [path, path]


def test_a_context_before_the_verb_and_a_namespace_after_it(
    server: ApiServer, config: Path
) -> None:
    assert run(config, "--context", "there", "list", "-n", "team-c").returncode == 0
    assert server.paths == ["/apis/holdfast.dev/v1alpha1/namespaces/team-c/checkpoints"]


def test_a_context_is_used_without_an_active_one(tmp_path: Path, server: ApiServer) -> None:
    config = kubeconfig(tmp_path / "config", server.url, {"there": "team-b"}, None)
    assert run(config, "--context", "there", "list").returncode == 0
    assert "kubectl config get-contexts" in complaint(config, "list")


@pytest.fixture
def away() -> Iterator[str]:
    """Return the URL of an API server that does not run."""
    with closed_port() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.fault("The CLI cannot reach the API server")
def test_an_api_server_that_cannot_be_reached(tmp_path: Path, away: str) -> None:
    config = kubeconfig(tmp_path / "config", away, {"here": None}, "here")
    line = complaint(config, "status", "gpt")
    assert f"{away} of context here cannot be reached" in line
    assert "refused" in line and "check that the cluster runs" in line


ON_A_CLUSTER = {
    "diff": ("job/gpt@1", "job/gpt@2"),
    "events": ("gpt",),
    "export": ("job/gpt", "--format", "hf", "--to", "out"),
    "import": ("store/main",),
    "inject": ("gpt", "--kill", "rank=0", "--yes"),
    "list": (),
    "logs": ("gpt",),
    "merge": ("job/gpt@1", "job/gpt@2", "--method", "mean", "--to", "out"),
    "pin": ("job/gpt@1",),
    "prune": ("gpt", "--yes"),
    "restart": ("gpt", "--from-start", "--yes"),
    "restore": ("gpt@1", "--yes"),
    "save": ("gpt",),
    "show": ("job/gpt",),
    "status": (),
    "top": (),
    "unpin": ("job/gpt@1",),
    "verify": ("job/gpt",),
}


@pytest.mark.fault("The CLI cannot reach the API server")
@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"completion", "doctor"}))
def test_every_verb_says_which_api_server_cannot_be_reached(
    tmp_path: Path,
    away: str,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`completion` has no names then, and `doctor` is a list of what is wrong."""
    config = kubeconfig(tmp_path / "config", away, {"here": None}, "here")
    monkeypatch.setattr("holdfast_cli.cluster.KUBECONFIG", str(config))
    assert program.run([verb, *ON_A_CLUSTER[verb]], "kubectl holdfast") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{away} of context here cannot be reached" in err


@pytest.mark.fault("The CLI meets custom resources of another version")
def test_a_cluster_with_another_version_of_the_custom_resources(
    server: ApiServer, config: Path
) -> None:
    server.answers["GET"] = 404, "404 page not found\n"
    versions = [{"version": "v1beta1"}, {"version": "v1"}]
    groups = [{"name": "apps", "versions": []}, {"name": "holdfast.dev", "versions": versions}]
    server.answers["/apis/"] = 200, json.dumps({"groups": groups})
    line = complaint(config, "list", code=6)
    assert "checkpoints.holdfast.dev of version v1beta1, v1 only" in line
    assert "install the holdfast-cli of the release" in line


@pytest.mark.fault("The CLI meets custom resources of another version")
@pytest.mark.parametrize(
    "words",
    [
        ("show", "checkpoint/gpt-1"),
        ("pin", "checkpoint/gpt-1"),
        ("verify", "checkpoint/gpt-1"),
        ("export", "checkpoint/gpt-1", "--format", "hf", "--to", "out"),
        ("restore", "job@40", "--yes"),
        ("prune", "job", "--yes"),
    ],
    ids=lambda words: words[0],
)
def test_an_object_with_a_value_of_a_later_version(
    training: ApiServer, config: Path, words: tuple[str, ...]
) -> None:
    later = checkpoint(40, 3, name="gpt-1").to_dict()
    later["status"]["phase"] = "Frozen"
    training.answers["/checkpoints"] = 200, json.dumps({"items": [later]})
    training.answers["/checkpoints/gpt-1"] = 200, json.dumps(later)
    line = complaint(config, *words, code=6)
    assert "Checkpoint gpt-1 is of another version: status.phase has the value 'Frozen'" in line
    assert training.bodies == []


def test_a_job_that_is_being_deleted_saves_no_more(server: ApiServer, config: Path) -> None:
    server.answer({"metadata": {"name": "gpt", "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert "gpt is being deleted, and saves no more" in complaint(config, "save", "gpt", code=6)


def test_an_api_server_that_speaks_another_protocol(tmp_path: Path, server: ApiServer) -> None:
    url = server.url.replace("http:", "https:")
    config = kubeconfig(tmp_path / "config", url, {"here": None}, "here")
    assert f"{url} of context here cannot be reached" in complaint(config, "list")


@pytest.mark.fault("The CLI has no kubeconfig")
def test_no_kubeconfig(tmp_path: Path) -> None:
    line = complaint(tmp_path / "missing", "list")
    assert "no kubeconfig found" in line and "set KUBECONFIG" in line


@pytest.mark.parametrize("text", ["{", "[]", "clusters: 7", "apiVersion: v1\nkind: Config"])
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config"
    config.write_text(text)
    assert str(config) in complaint(config, "list")


def test_an_unknown_context(config: Path) -> None:
    line = complaint(config, "--context", "nowhere", "list")
    assert "context nowhere" in line and "kubectl config get-contexts" in line


@pytest.mark.fault("The CLI is refused (401, 403, 404, 5xx)")
@pytest.mark.parametrize(
    ("status", "message", "expected", "code"),
    [
        (401, "Unauthorized", "log in to the cluster again", 1),
        (403, 'User "jane" cannot get resource', 'User "jane" cannot get resource', 1),
        (403, "forbidden", "ask an administrator", 1),
        (
            404,
            'trainingjobs.holdfast.dev "gpt" not found',
            "trainingjobs/gpt and checkpointadoptions/gpt not found in namespace",
            5,
        ),
        (500, "etcd is away", "(500): etcd is away", 1),
    ],
)
def test_a_refusal_says_what_to_do(
    server: ApiServer, config: Path, status: int, message: str, expected: str, code: int
) -> None:
    server.refuse(status, message)
    assert expected in complaint(config, "status", "gpt", code=code)


@pytest.mark.fault("The CLI meets a cluster without Holdfast")
def test_a_cluster_without_the_custom_resources(server: ApiServer, config: Path) -> None:
    server.answers["GET"] = 404, "404 page not found\n"
    line = complaint(config, "list")
    assert "no resource checkpoints.holdfast.dev" in line and "install Holdfast's chart" in line


def test_a_checkpoint_that_exists_already(server: ApiServer, config: Path) -> None:
    server.answer({"metadata": {"name": "gpt", "uid": "u"}, "status": {"step": 5}})
    server.refuse(409, 'checkpoints.holdfast.dev "mine" already exists', "POST")
    line = complaint(config, "save", "gpt", "--name", "mine", code=6)
    assert "checkpoints/mine exists already" in line and "--name" in line


MINE = {
    "kind": "Checkpoint",
    "metadata": {"name": "mine", "uid": "u"},
    "spec": {"jobRef": {"name": "gpt"}},
}


def test_a_save_that_expires_says_why(server: ApiServer, config: Path) -> None:
    server.answers["/trainingjobs/gpt"] = (
        200,
        json.dumps({"kind": "TrainingJob", "metadata": {}}),
    )
    server.refuse(404, "not found")
    server.answers["POST"] = 201, json.dumps(MINE)
    committed = {"type": "Committed", "message": "the job ended before this was saved"}
    status = {"phase": "Failed", "conditions": [committed]}
    server.answers["/checkpoints/mine"] = 200, json.dumps(MINE | {"status": status})
    ended = run(config, "save", "gpt", "--wait", "--name", "mine")
    assert ended.returncode == 1
    assert "mine failed: the job ended before this was saved" in ended.stderr


@pytest.mark.parametrize("pin", [False, True])
def test_a_save_of_a_suspended_job_says_when_it_happens_and_what_keeps_it(
    server: ApiServer, config: Path, *, pin: bool
) -> None:
    server.answer(
        {"kind": "TrainingJob", "metadata": {}, "status": {"step": 5, "phase": "Suspended"}}
    )
    server.answers["POST"] = 201, json.dumps({"kind": "Checkpoint"})
    ended = run(config, "save", "gpt", *(["--pin"] if pin else []))
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert re.fullmatch(
        r"checkpoint gpt-manual-[a-z0-9]{5} requested; gpt is Suspended, it saves when it trains",
        lines[0],
    )
    assert ("--pin keeps it" in ended.stderr) != pin


def test_json_is_not_watched(config: Path) -> None:
    ended = run(config, "status", "--watch", "--output", "json")
    assert ended.returncode == 2
    assert "--watch shows tables only" in ended.stderr


@pytest.mark.fault("A kubeconfig names its files by relative paths")
def test_paths_in_a_kubeconfig_are_relative_to_it(server: ApiServer, tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", server.url, {"here": None}, "here")
    document = json.loads(path.read_text())
    document["users"] = [{"name": "u", "user": {"tokenFile": "token"}}]
    path.write_text(json.dumps(document))
    (tmp_path / "token").write_text("t")
    ended = run(path, "list")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.fault("The connection of the CLI breaks during a read")
def test_a_read_whose_connection_breaks_is_repeated(server: ApiServer, config: Path) -> None:
    server.drops = {"GET": 2}
    assert run(config, "list").returncode == 0
    assert len(server.paths) == 3


@pytest.fixture
def without_pauses(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_cli.cluster.KUBECONFIG", str(config))
    for module, name in (
        ("cluster", "AWAY"),
        ("saving", "LOOK"),
        ("status", "WATCH"),
    ):
        monkeypatch.setattr(f"holdfast_cli.{module}.{name}_SECONDS", 0)


@pytest.mark.fault("The API server is away for a time while a verb of the CLI waits")
@pytest.mark.usefixtures("without_pauses")
def test_a_save_that_waits_outlives_an_outage_of_the_api_server(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse(404, "not found")
    server.answers["/trainingjobs/gpt"] = 200, json.dumps({"kind": "TrainingJob", "metadata": {}})
    server.answers["POST"] = 201, json.dumps(MINE)
    committed = MINE | {"status": {"phase": "Committed"}}
    server.answers["/checkpoints/mine"] = 200, json.dumps(committed)
    server.away = {"/checkpoints/mine": 5}
    assert (
        program.run(["save", "gpt", "--pin", "--wait", "--name", "mine"], "kubectl holdfast") == 0
    )
    out, err = capsys.readouterr()
    assert out == "checkpoint mine committed\n"
    (line,) = err.splitlines()
    assert "refused checkpoints/mine (503)" in line
    assert line.endswith("; waiting until it answers")


@pytest.mark.fault("A Checkpoint is deleted while the CLI waits for its save")
@pytest.mark.usefixtures("without_pauses")
def test_a_save_that_waits_says_for_what_and_that_its_object_was_deleted(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse(404, "not found")
    suspended = {"kind": "TrainingJob", "metadata": {}, "status": {"phase": "Suspended"}}
    server.answers["/trainingjobs/gpt"] = 200, json.dumps(suspended)
    server.answers["POST"] = 201, json.dumps(MINE)
    assert (
        program.run(["save", "gpt", "--pin", "--wait", "--name", "mine"], "kubectl holdfast") == 6
    )
    assert capsys.readouterr().err.splitlines() == [
        "gpt is Suspended, it saves when it trains",
        "kubectl holdfast: checkpoint mine was deleted meanwhile: it was not saved, or is not kept",
    ]


@pytest.mark.fault("The API server is away for a time while a verb of the CLI waits")
@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("verb", ["status", "top"])
def test_a_watch_outlives_an_outage_of_the_api_server(
    server: ApiServer,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []

    def show(*_: object) -> None:
        shown.append(len(server.paths))
        server.drops = {"GET": 7}
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("holdfast_cli.status.show", show)
    assert program.run([verb, "-w"], "kubectl holdfast") == 130
    err = capsys.readouterr().err
    assert err.count("cannot be reached") == err.count("; waiting until it answers") == 2


@pytest.mark.fault("The API server is away for a time while a verb of the CLI waits")
@pytest.mark.usefixtures("without_pauses")
def test_an_outage_that_is_longer_than_a_verb_waits_ends_it(server: ApiServer) -> None:
    server.away = {"/checkpoints": 1_000_000}
    cluster = ClusterClient.connect(None, None).patient(0.0)
    with pytest.raises(CommandError, match="503"):
        cluster.items("checkpoints")


@pytest.mark.fault("The connection of the CLI breaks during a create")
def test_a_create_whose_connection_breaks_is_not_repeated(server: ApiServer, config: Path) -> None:
    """The API server may have created the object."""
    server.answer({"metadata": {"name": "gpt"}})
    server.drops = {"POST": 1}
    assert "cannot be reached" in complaint(config, "save", "gpt")
    assert len([path for path in server.paths if path.endswith("/checkpoints")]) == 1


ADOPTION = {
    "kind": "CheckpointAdoption",
    "metadata": {"name": "lm", "uid": "u"},
    "spec": {"workers": 1},
    "status": {"members": [0], "pods": [{"worker": 0, "uid": "a", "birth": 0}]},
}


@pytest.fixture
def adopting(server: ApiServer) -> ApiServer:
    """Return a server with a CheckpointAdoption, its pod and no TrainingJob."""
    server.refuse(404, "not found")
    pod = {"metadata": {"name": "lm-0-x", "uid": "a"}, "spec": {"containers": []}}
    server.answers |= {
        "/checkpointadoptions/lm": (200, json.dumps(ADOPTION)),
        "/checkpoints": (200, json.dumps({"items": []})),
        "/pods": (200, json.dumps({"items": [pod]})),
        "7072/proxy/metrics": (
            200,
            'holdfast_newest_step{rank="0",tier="node"} 40.0\n',
        ),
    }
    return server


def test_status_finds_an_adoption_by_its_name_with_pods_and_steps(
    adopting: ApiServer, config: Path
) -> None:
    ended = run(config, "status", "lm", "-o", "json")
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert (shown["kind"], shown["tiers"]) == ("CheckpointAdoption", {"0": {"node": 40}})
    assert [pod["pod"] for pod in shown["pods"]] == ["lm-0-x"]


class SlowSidecars(ClusterClient):
    """A cluster whose sidecars answer when all of them are asked."""

    all_asked = Barrier(8)

    def metrics(self, pod: str) -> str:
        self.all_asked.wait(HANG_SECONDS)
        if pod == "p3":
            raise CommandError("it does not answer")
        return f'holdfast_newest_step{{rank="{pod[1:]}",tier="node"}} 40.0\n'


@pytest.mark.fault("The sidecars of a gang do not answer while `status` asks for the newest steps")
def test_silent_sidecars_are_waited_for_at_the_same_time() -> None:
    members = [MemberPod(n, f"p{n}", "n1", "Running", 0) for n in range(8)]
    cluster = SlowSidecars(None, "team-a", "here", "http://here")
    found = newest_steps(cluster, members)
    assert found == {n: {"node": 40} for n in range(8) if n != 3}


def test_status_is_shown_to_a_user_who_may_not_list_pods(adopting: ApiServer, config: Path) -> None:
    forbidden = {"kind": "Status", "code": 403, "message": "cannot list pods"}
    adopting.answers["/pods"] = 403, json.dumps(forbidden)
    ended = run(config, "status", "lm")
    assert ended.returncode == 0, ended.stderr
    assert "CheckpointAdoption lm" in ended.stdout and "cannot list pods" in ended.stdout


def test_status_without_a_name_lists_gangs_of_both_kinds(adopting: ApiServer, config: Path) -> None:
    job = {"kind": "TrainingJob", "metadata": {"name": "gpt"}, "spec": {"workers": 2}}
    adopting.answers["/trainingjobs"] = 200, json.dumps({"items": [job]})
    adopting.answers["/checkpointadoptions"] = 200, json.dumps({"items": [ADOPTION]})
    ended = run(config, "status")
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [
        "TrainingJobs",
        "NAME",
        "gpt",
        "CheckpointAdoptions",
        "NAME",
        "lm",
    ]


ALL = "/apis/holdfast.dev/v1alpha1"


def test_status_of_all_namespaces_names_them(server: ApiServer, config: Path) -> None:
    jobs = [
        {
            "kind": "TrainingJob",
            "metadata": {"name": "gpt", "namespace": namespace},
            "spec": {"workers": 2},
        }
        for namespace in ("team-b", "team-a")
    ]
    server.answers["/trainingjobs"] = 200, json.dumps({"items": jobs})
    ended = run(config, "status", "-A")
    assert ended.returncode == 0, ended.stderr
    assert server.paths == [f"{ALL}/trainingjobs", f"{ALL}/checkpointadoptions"]
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [
        ["TrainingJobs"],
        ["NAMESPACE", "NAME"],
        ["team-a", "gpt"],
        ["team-b", "gpt"],
    ]


def test_checkpoints_of_all_namespaces_name_them(server: ApiServer, config: Path) -> None:
    steps = {"team-b": 10, "team-a": 20}
    items = [
        {"metadata": {"name": f"gpt-{step}", "namespace": namespace}, "spec": {"step": step}}
        for namespace, step in steps.items()
    ]
    server.answers["/checkpoints"] = 200, json.dumps({"items": items})
    ended = run(config, "list", "--all-namespaces")
    assert ended.returncode == 0, ended.stderr
    assert server.paths == [f"{ALL}/checkpoints"]
    rows = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert rows == [["NAMESPACE", "NAME"], ["team-a", "gpt-20"], ["team-b", "gpt-10"]]


def test_a_cluster_without_jobs_says_so(server: ApiServer, config: Path) -> None:
    ended = run(config, "status", "-A")
    assert ended.stdout == "the cluster has no TrainingJob and no CheckpointAdoption\n"


def test_a_refused_list_of_all_namespaces_names_the_missing_right(
    server: ApiServer, config: Path
) -> None:
    server.refuse(403, "cannot list trainingjobs at the cluster scope")
    assert "for this right in all namespaces" in complaint(config, "status", "-A")


@pytest.mark.parametrize(
    "arguments",
    [("status", "gpt", "-A"), ("list", "gpt", "-A"), ("-n", "team-a", "status", "-A")],
)
def test_all_namespaces_exclude_a_job_and_a_namespace(
    config: Path, arguments: tuple[str, ...]
) -> None:
    ended = run(config, *arguments)
    assert ended.returncode == 2
    assert "lists everything: omit it, or omit" in ended.stderr


@pytest.fixture
def lost(server: ApiServer) -> ApiServer:
    """Return a server with a job that has lost its checkpoints and waits for a person."""
    server.refuse(404, "not found")
    waits = {"type": "CheckpointsLost", "status": "True", "message": "to start over loses 17 steps"}
    status = {"conditions": [waits], "lineage": [{"round": 0}, {"round": 3}]}
    metadata = {"name": "gpt", "uid": "u"}
    job = {"kind": "TrainingJob", "metadata": metadata, "spec": {}, "status": status}
    server.answers["/trainingjobs/gpt"] = 200, json.dumps(job)
    return server


def test_a_start_over_names_the_round_that_is_given_up(lost: ApiServer, config: Path) -> None:
    ended = run(config, "restart", "gpt", "--from-start", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert lost.bodies == [
        {"spec": {"rollback": {"round": 3, "step": None}}, "metadata": {"uid": "u"}}
    ]
    assert "gpt starts over" in ended.stdout


def test_a_start_over_without_a_terminal_needs_yes(lost: ApiServer, config: Path) -> None:
    line = complaint(config, "restart", "gpt", "--from-start", code=2)
    assert "loses 17 steps" in line and "--yes" in line
    assert lost.bodies == []


def test_a_restart_says_from_where(lost: ApiServer, config: Path) -> None:
    ended = run(config, "restart", "gpt")
    assert ended.returncode == 2
    assert "--from-start" in ended.stderr


def test_a_start_over_of_a_job_that_does_not_exist(lost: ApiServer, config: Path) -> None:
    assert "not found in namespace team-a" in complaint(
        config, "restart", "other", "--from-start", code=5
    )


@pytest.fixture
def training(server: ApiServer) -> ApiServer:
    """Return a server with a job that trains, and has a checkpoint of step 40."""
    server.refuse(404, "not found")
    given = job(
        2,
        status(3, (0, 0), step=Step(57), lineage=(LineageEntry(round=RestartRound(3)),)),
        store="main",
    )
    server.answers["/trainingjobs/job"] = 200, json.dumps(given.to_dict())
    items = {"items": [checkpoint(40, 3).to_dict()]}
    server.answers["/checkpoints"] = 200, json.dumps(items)
    return server


def test_a_rollback_names_its_step_and_the_round_that_was_seen(
    training: ApiServer, config: Path
) -> None:
    ended = run(config, "restore", "job@40", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert training.bodies == [
        {"spec": {"rollback": {"round": 3, "step": 40}}, "metadata": {"uid": UID}}
    ]
    assert "goes back to step 40" in ended.stdout


def test_a_rollback_without_a_terminal_needs_yes(training: ApiServer, config: Path) -> None:
    ended = run(config, "restore", "job@40")
    assert ended.returncode == 2
    assert "17 steps are trained again" in ended.stderr
    assert "--yes" in ended.stderr
    assert training.bodies == []


def test_a_rollback_to_an_unknown_step_is_refused(training: ApiServer, config: Path) -> None:
    assert "no checkpoint of step 41" in complaint(config, "restore", "job@41", code=5)
    assert training.bodies == []


def test_a_rollback_needs_a_step(training: ApiServer, config: Path) -> None:
    line = complaint(config, "restore", "job", code=2)
    assert "job@STEP" in line and "kubectl holdfast list job" in line
    assert "'job@-1' is no name" in complaint(config, "restore", "job@-1", code=2)


def test_a_fork_that_is_only_shown_creates_nothing(training: ApiServer, config: Path) -> None:
    ended = run(config, "restore", "job", "--to-new-job", "fork", "--workers", "4", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert (shown["metadata"]["name"], shown["spec"]["workers"]) == ("fork", 4)
    assert not any("fork" in path for path in training.paths)


def test_a_fork_without_a_terminal_needs_yes(training: ApiServer, config: Path) -> None:
    ended = run(config, "restore", "job@40", "--to-new-job", "fork")
    assert ended.returncode == 2
    assert "Job fork gets the spec of job with 2 workers, and starts from step 40" in ended.stderr
    assert "--yes" in ended.stderr


def test_options_of_a_fork_need_its_name(config: Path) -> None:
    for option in (["--workers", "4"], ["--dry-run"]):
        ended = run(config, "restore", "job@40", *option)
        assert ended.returncode == 2
        assert "belong to --to-new-job" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [("logs", "gpt"), ("events", "gpt"), ("inject", "gpt", "--kill", "rank=0", "--yes")],
    ids=lambda words: words[0],
)
def test_a_verb_on_call_of_a_job_that_does_not_exist(
    server: ApiServer, config: Path, words: tuple[str, ...]
) -> None:
    server.answers["namespaces/team-a"] = (
        200,
        json.dumps(
            {"metadata": {"name": "team-a", "labels": {"holdfast.dev/game-days": "allowed"}}}
        ),
    )
    server.refuse(404, 'trainingjobs.holdfast.dev "gpt" not found')
    line = complaint(config, *words, code=5)
    assert "trainingjobs/gpt and checkpointadoptions/gpt not found in namespace team-a" in line


@pytest.fixture
def game_day(server: ApiServer) -> ApiServer:
    """A namespace with the label, with a job of one running pod."""
    labels = {"holdfast.dev/game-days": "allowed"}
    uid = "8d2f8f6e-0000-4000-8000-000000000001"
    gang = {
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "namespace": "team-a", "uid": uid},
        "spec": {"workers": 1},
        "status": {"phase": "Running", "members": [0], "restartRound": 0},
    }
    pod = {
        "metadata": {"name": pod_name("gpt", JobUid(uid), 0, 0), "uid": "p"},
        "spec": {"nodeName": "n-1"},
        "status": {"phase": "Running"},
    }
    server.answers |= {
        "namespaces/team-a": (200, json.dumps({"metadata": {"name": "team-a", "labels": labels}})),
        "/trainingjobs/gpt": (200, json.dumps(gang)),
        "/pods": (200, json.dumps({"items": [pod]})),
        "DELETE": (200, "{}"),
    }
    server.refuse(404, "not found")
    return server


def test_a_game_day_without_a_terminal_needs_yes_and_says_what_would_happen(
    game_day: ApiServer, config: Path
) -> None:
    ended = run(config, "inject", "gpt", "--delete-pod", "0")
    assert ended.returncode == 2
    assert "--yes confirms it" in ended.stderr and "of worker 0 is deleted" in ended.stderr
    assert not any("/pods/" in path for path in game_day.paths), "nothing was deleted"
    ended = run(config, "inject", "gpt", "--delete-pod", "0", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert "kubectl holdfast status gpt -w shows the recovery" in ended.stdout


def test_a_game_day_in_a_namespace_without_the_label_is_forbidden_by_its_state(
    game_day: ApiServer, config: Path
) -> None:
    game_day.answers["namespaces/team-a"] = 200, json.dumps({"metadata": {"name": "team-a"}})
    line = complaint(config, "inject", "gpt", "--delete-pod", "0", "--yes", code=6)
    assert "kubectl label namespace team-a holdfast.dev/game-days=allowed" in line
