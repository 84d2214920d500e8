"""Registry mode: the requests to the machine's Docker engine, and the mirror that stands in for one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from testbed import config, engine, images, load, nodeimage, tools
from testbed.config import Bed
from testbed.mirror import standins
from testbed.mirror.__main__ import environment, share_tools
from testbed.shell import BedError
from testbed.steps import is_done


def docker_that(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a `docker` first on PATH. Return the file to which it writes its arguments."""
    asked = folder / "asked"
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("HOLDFAST_TESTBED_MODE", raising=False)
    monkeypatch.setenv("HOLDFAST_TESTBED_DIR", str(folder / "bed"))
    return asked


ENGINE = """
import json, pathlib, re, sys
words, store = sys.argv[1:], pathlib.Path(__file__).parent / "store"
images = json.loads(store.read_text()) if store.exists() else {}
if words[0] == "build":
    last = pathlib.Path(words[-1]) / "Dockerfile"
    text = " ".join(words) + (sys.stdin.read() if words[-1] == "-" else last.read_text())
    label = re.search(r"dev[.]holdfast[.]inputs=([0-9a-f]+)", text)
    images[words[words.index("-t") + 1]] = label.group(1) if label else ""
elif words[0] == "pull":
    images[words[-1]] = ""
elif words[0] == "images" and words[-1] in images:
    print("some-id")
elif words[0] == "image" and words[-1] in images:
    label = images[words[-1]]
    print("some-id" if "Id" in words[3] else json.dumps({"dev.holdfast.inputs": label}))
store.write_text(json.dumps(images))
"""
"""An engine that stores the label of each image, but not how the image was built."""


@pytest.mark.parametrize(
    ("script", "mode", "warning"),
    [
        pytest.param("exit 0", "registry", "", id="an engine that pulls"),
        pytest.param(
            '[ "$1" = info ] || { echo no route to the registry >&2; exit 1; }',
            "local",
            "no route to the registry",
            id="an engine that pulls nothing",
        ),
        pytest.param("exit 1", "local", "", id="no engine"),
    ],
)
def test_the_mode_is_found_and_kept(
    script: str,
    mode: str,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    docker_that(tmp_path, script, monkeypatch)
    bed = engine.detect(tmp_path / "bed")
    assert bed.local == (mode == "local")
    assert (tmp_path / "bed/mode").read_text() == mode
    warned = capsys.readouterr().err
    assert warning in warned
    assert bool(warned) == bool(warning)
    docker_that(tmp_path, "exit 1", monkeypatch)
    assert engine.detect(tmp_path / "bed") == bed


def test_the_node_image_that_is_pulled_is_the_one_that_kind_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = docker_that(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setenv("HOLDFAST_TESTBED_NODE_IMAGE", "other/node:v1")
    engine.detect(tmp_path / "bed")
    assert "pull -q other/node:v1" in asked.read_text()


def test_without_an_answer_of_the_user_the_node_image_is_pinned_by_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOLDFAST_TESTBED_NODE_IMAGE", raising=False)
    name, _, pin = config.kindest_node().partition("@sha256:")
    assert name.startswith("kindest/node:v")
    assert len(pin) == 64
    assert name == standins.NODE


@pytest.mark.fault("Images are built on the base that the user pins")
def test_images_are_built_from_the_base_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed, pinned = Bed(tmp_path, local=False), f"{config.REGISTRY_BASE}@sha256:{'0' * 64}"
    monkeypatch.setenv("HOLDFAST_TESTBED_BASE_IMAGE", pinned)
    bases = {image.tag: images.base_of(bed, image) for image in images.IMAGES}
    assert bases["holdfast/operator:dev"] == bases["holdfast/sidecar:dev"] == pinned
    assert bases["holdfast/trainer-gpt:dev"] == config.TORCH_BASE_IMAGE
    asked = docker_that(tmp_path, "exit 1", monkeypatch)
    with pytest.raises(BedError):
        images.registry_bases(bed, tmp_path / "log")
    assert pinned in asked.read_text()


def test_status_misses_only_what_the_mode_needs(tmp_path: Path) -> None:
    registry = {s.name for s in tools.needed(Bed(tmp_path, local=False))}
    assert {"kubernetes", "etcd", "helm", "minio", "versitygw", "kind"} == registry
    assert {s.name for s in tools.needed(Bed(tmp_path, local=True))} > registry


def test_torch_is_of_the_same_packages_in_both_modes() -> None:
    text = images.torch_dockerfile()
    assert text.startswith(f"FROM {config.REGISTRY_TORCH_BASE}\n")
    assert all(package in text for package in nodeimage.TORCH_PACKAGES)
    assert all(pattern in text for pattern in nodeimage.STRIPPED)


def test_bases_that_are_there_are_neither_pulled_nor_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    run = f'exec {sys.executable} {tmp_path}/engine.py "$@"'
    asked = docker_that(tmp_path, run, monkeypatch)
    bed = Bed(tmp_path / "bed", local=False)
    bed.prepare()
    (bed.bin / "minio").write_text("minio")

    def work() -> list[str]:
        asked.write_text("")
        images.registry_bases(bed, bed.logs / "images.log")
        return [line.split()[0] for line in asked.read_text().splitlines()]

    first = work()
    assert (first.count("pull"), first.count("build")) == (2, 2)
    again = work()
    assert (again.count("pull"), again.count("build")) == (0, 0)
    monkeypatch.setattr(config, "REGISTRY_TORCH_BASE", "debian:other")
    changed = work()
    assert (changed.count("pull"), changed.count("build")) == (1, 1)


def test_an_image_is_known_by_its_index_and_its_configuration_while_a_tag_names_it() -> None:
    listing = (
        "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
        "docker.io/holdfast/operator:dev application/vnd.oci.image.index.v1+json sha256:aa 1 MiB -\n"
        "docker.io/holdfast/operator@sha256:bb application/x sha256:bb 1 MiB -\n"
        "sha256:cc application/x sha256:dd 1 MiB -\n"
        "sha256:ee application/x sha256:aa 1 MiB -\n"
    )
    assert load.ids_of_tagged(listing) == {"sha256:aa", "sha256:ee"}


def test_settings_of_an_engine_go_over_ours_and_none_takes_one_out(tmp_path: Path) -> None:
    bed = Bed(tmp_path, local=True)
    found = engine.daemon_config(
        bed, {"storage-driver": None, "dns": ["192.0.2.1"], "features": {}}
    )
    assert "storage-driver" not in found
    assert found["dns"] == ["192.0.2.1"]
    assert found["features"] == {}
    assert found["data-root"] == str(bed.data / "docker")


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        pytest.param("python:3.13-slim", ("library/python", "3.13-slim"), id="official"),
        pytest.param("kindest/node:v1", ("kindest/node", "v1"), id="of a project"),
    ],
)
def test_where_a_registry_keeps_an_image_of_docker_hub(tag: str, expected: tuple[str, str]) -> None:
    assert standins.repository(tag) == expected


def test_a_command_on_the_other_machine_gets_an_engine_and_no_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TESTBED_MODE", "local")
    bed = Bed(tmp_path, local=True)
    found = environment(bed)
    assert "HOLDFAST_TESTBED_MODE" not in found
    assert found["DOCKER_HOST"] == f"unix://{bed.docker_socket}"
    assert found["HOLDFAST_TESTBED_DIR"] == str(tmp_path / "bed")


def test_tools_that_are_built_already_are_shared(tmp_path: Path) -> None:
    own, bed = Bed(tmp_path / "own", local=True), Bed(tmp_path / "bed", local=False)
    own.prepare()
    etcd, kind = (s for s in tools.needed(bed) if s.name in ("etcd", "kind"))
    built = tools.build_step(own, kind)
    (own.bin / "kind").write_text("program")
    (own.stamps / built.name).write_text(config.digest(*built.inputs))
    share_tools(own, bed)
    assert is_done(tools.build_step(bed, kind), bed.stamps)
    assert (bed.bin / "kind").read_text() == "program"
    assert not is_done(tools.build_step(bed, etcd), bed.stamps)
