"""Parsers of the output of apt, Docker, Kubernetes and /proc."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from testbed.archive import copy_unknown
from testbed.faults import find_container, parse_processes
from testbed.host import mirror
from testbed.images import relocate
from testbed.shell import BedError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "Types: deb\nURIs: http://a.test/debian\n", "http://a.test/debian", id="deb822"
        ),
        pytest.param("deb http://b.test/debian bookworm main", "http://b.test/debian", id="line"),
        pytest.param("deb [arch=amd64] https://c.test/d x main", "https://c.test/d", id="options"),
        pytest.param("# deb http://d.test/debian x main", None, id="comment"),
    ],
)
def test_mirror(text: str, expected: str | None) -> None:
    assert mirror(text) == expected


def pod(**state: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "ns", "name": "p"},
        "spec": {"nodeName": "w1"},
        "status": {
            "containerStatuses": [
                {"name": "trainer", "containerID": "containerd://aaa", "state": state}
            ],
            "initContainerStatuses": [
                {"name": "sidecar", "containerID": "containerd://bbb", "state": {"running": {}}}
            ],
        },
    }


def test_a_native_sidecar_is_found_among_the_init_containers() -> None:
    assert find_container(pod(running={}), "sidecar") == ("w1", "bbb")


def test_a_container_that_does_not_run_is_an_error_that_names_those_that_do() -> None:
    with pytest.raises(BedError, match="running: sidecar"):
        find_container(pod(terminated={}), "trainer")


def test_a_process_that_ended_meanwhile_is_left_out() -> None:
    assert parse_processes("12 python3 train.py\n13\n14 \n") == {12: "python3 train.py"}


def test_an_archive_leaves_out_known_blobs_and_the_old_index() -> None:
    source, out = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as saved:
        for name in ("blobs/sha256/aa", "blobs/sha256/bb", "index.json", "manifest.json"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            saved.addfile(entry, io.BytesIO(b"x"))
    source.seek(0)
    with tarfile.open(fileobj=out, mode="w") as target:
        copy_unknown(source, target, {"sha256:aa"})
    out.seek(0)
    with tarfile.open(fileobj=out) as result:
        assert result.getnames() == ["blobs/sha256/bb", "index.json"]


def test_a_script_gets_the_images_python() -> None:
    script = "#!/home/me/.venv/bin/python\nimport sys\n"
    assert relocate(script) == "#!/opt/holdfast/bin/python3\nimport sys\n"
