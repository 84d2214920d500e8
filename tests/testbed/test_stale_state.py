"""How the testbed treats an engine and a cluster that an earlier session left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.cluster import ClusterAction, cni_config, decide_cluster, routes_script
from testbed.config import Bed
from testbed.engine import EngineAction, decide_engine, launch, our_process, rules_to_delete
from testbed.shell import BedError

NODES = ("cp", "w1")


@pytest.mark.parametrize(
    ("answers", "dockerd", "containerd", "expected"),
    [
        pytest.param(True, True, True, EngineAction.USE, id="all is well"),
        pytest.param(False, False, False, EngineAction.START, id="session ended"),
        pytest.param(False, True, False, EngineAction.RESTART, id="containerd died"),
        pytest.param(False, False, True, EngineAction.RESTART, id="dockerd died"),
        pytest.param(False, True, True, EngineAction.RESTART, id="hangs"),
    ],
)
def test_engine(answers: bool, dockerd: bool, containerd: bool, expected: EngineAction) -> None:
    found = decide_engine(answers=answers, dockerd_alive=dockerd, containerd_alive=containerd)
    assert found is expected


def test_a_daemon_that_ends_at_its_start_is_reported_at_once(tmp_path: Path) -> None:
    bed = Bed(tmp_path, local=True)
    bed.prepare()
    command = ["sh", "-c", "echo no room; exit 1"]
    with pytest.raises(BedError, match=r"(?s)containerd did not start; .*no room"):
        launch(bed, command, "containerd", lambda: False)


@pytest.mark.parametrize(
    ("containers", "same", "api", "expected"),
    [
        pytest.param({}, False, False, ClusterAction.CREATE, id="none"),
        pytest.param({"cp": "running", "w1": "running"}, True, True, ClusterAction.USE, id="works"),
        pytest.param(
            {"cp": "exited", "w1": "exited"}, True, False, ClusterAction.START, id="session ended"
        ),
        pytest.param(
            {"cp": "running", "w1": "paused"}, True, True, ClusterAction.START, id="one paused"
        ),
        pytest.param(
            {"cp": "running", "w1": "running"}, True, False, ClusterAction.START, id="API silent"
        ),
        pytest.param({"cp": "running"}, True, True, ClusterAction.RECREATE, id="half created"),
        pytest.param(
            {"cp": "running", "w1": "running"},
            False,
            True,
            ClusterAction.RECREATE,
            id="other inputs",
        ),
    ],
)
def test_cluster(
    containers: dict[str, str], same: bool, api: bool, expected: ClusterAction
) -> None:
    action, reason = decide_cluster(containers, expected=NODES, same_inputs=same, api_answers=api)
    assert action is expected
    assert reason


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("not a number", id="garbage"),
        pytest.param("1", id="a pid that is another program's now"),
        pytest.param("4194305", id="a pid that does not exist"),
    ],
)
def test_a_stale_pid_file_is_no_engine(tmp_path: Path, text: str) -> None:
    bed = Bed(tmp_path, local=True)
    bed.prepare()
    (bed.run / "docker.pid").write_text(text)
    assert our_process(bed, "dockerd") is None


def test_rules_are_removed_before_the_chains_that_they_jump_to() -> None:
    rules = [
        "-P FORWARD ACCEPT",
        "-N DOCKER",
        "-N DOCKER-USER",
        "-A FORWARD -j DOCKER-USER",
        "-A DOCKER-USER -j RETURN",
        "-A INPUT -p tcp -j ACCEPT",
    ]
    assert rules_to_delete(rules) == [
        "-D FORWARD -j DOCKER-USER",
        "-F DOCKER",
        "-F DOCKER-USER",
        "-X DOCKER",
        "-X DOCKER-USER",
    ]


def test_a_node_routes_to_all_others_that_have_an_address() -> None:
    networks = {"cp": "10.244.0.0/24", "w1": "10.244.1.0/24", "w2": "10.244.2.0/24"}
    hosts = {"cp": "172.18.0.2", "w1": "172.18.0.3"}
    assert routes_script("cp", networks, hosts) == "ip route replace 10.244.1.0/24 via 172.18.0.3\n"


def test_each_node_has_its_own_pod_range() -> None:
    assert '"subnet": "10.244.1.0/24"' in cni_config("10.244.1.0/24")
    assert "10.244.1.0" not in cni_config("10.244.2.0/24")
