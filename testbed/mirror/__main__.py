"""`python3 -m testbed.mirror up | run COMMAND... | down`: see testbed/README.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed import config, engine, host, tools
from testbed.config import Bed, bed_root
from testbed.mirror import network, standins
from testbed.shell import BedError, Command, answers
from testbed.steps import Step, is_done, report_error, run_steps

REGISTRY = tools.ToolSet(
    "registry", {"registry": "github.com/distribution/distribution/v3/cmd/registry"}
)
DOCKER_29 = {
    "registry-mirrors": [f"http://{standins.ADDRESS}"],
    "features": {"containerd-snapshotter": True},
    "storage-driver": None,
    "ip-forward-no-drop": None,
    "dns": None,
}
"""Settings of a new Docker installation: images in containerd's store, and Docker's own firewall rules."""


def here() -> Bed:
    """Return the ordinary test bed, whose tools the stand-ins are built from."""
    return Bed(bed_root(), local=True)


def machine(root: Path) -> Bed:
    """Return the simulated machine: its engine, registry and their data."""
    return Bed(root / "mirror", local=True)


def environment(bed: Bed) -> dict[str, str]:
    """Return the environment of a command on the simulated machine: its Docker engine, its test bed's
    folder, and the tags of the stand-ins.
    """
    kept = {key: value for key, value in os.environ.items() if key != "HOLDFAST_TESTBED_MODE"}
    own = {key: value for key, value in bed.exports().items() if key.startswith("DOCKER_")}
    return {
        **kept,
        **own,
        "PATH": f"{bed.engine}/usr/bin:{os.environ['PATH']}",
        "HOLDFAST_TESTBED_DIR": str(bed.root / "bed"),
        "HOLDFAST_TESTBED_NODE_IMAGE": standins.NODE,
        "HOLDFAST_TESTBED_BASE_IMAGE": config.REGISTRY_BASE,
    }


def start_registry(bed: Bed, _: Path) -> None:
    if engine.our_process(bed, "registry") is not None:
        return
    file = bed.root / "registry.json"  # JSON is also YAML
    settings = {
        "version": 0.1,
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(bed.data / "registry")}},
        "http": {"addr": standins.ADDRESS},
    }
    file.write_text(json.dumps(settings))
    asks = ["curl", "-sf", f"http://{standins.ADDRESS}/v2/"]
    serve: Command = [bed.bin / "registry", "serve", file]
    engine.launch(bed, serve, "registry", lambda: answers(asks, env=os.environ))


def start_engine(bed: Bed, _: Path) -> str:
    engine.have(bed, DOCKER_29)
    network.cut_off_bridges()
    host.raise_inotify_limits()
    return engine.version(bed)


def share_tools(own: Bed, bed: Bed) -> None:
    """Link the tools that registry mode needs, with their stamps, so that equal sources are built once."""
    bed.prepare()
    for tool_set in tools.needed(bed):
        step, same = tools.build_step(bed, tool_set), tools.build_step(own, tool_set)
        if is_done(step, bed.stamps) or not is_done(same, own.stamps):
            continue
        for name in tool_set.packages:
            (bed.bin / name).unlink(missing_ok=True)
            (bed.bin / name).hardlink_to(own.bin / name)
        shutil.copyfile(own.stamps / step.name, bed.stamps / step.name)


def up() -> None:
    """Ensure that the simulated machine runs and its stand-ins are published.

    Needs root, as local mode does.
    """
    own = here()
    host.check_prerequisites(own)
    run_steps([*tools.tool_steps(own), tools.build_step(own, REGISTRY)], own)
    network.up()
    subprocess.run(network.enter([sys.executable, "-m", "testbed.mirror", "inside"]), check=True)


def up_inside() -> None:
    own = here()
    bed = machine(own.root)
    bed.root.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "debs"):
        if not (bed.root / name).is_symlink():
            (bed.root / name).symlink_to(own.root / name)
    registry = Step("registry", lambda log: start_registry(bed, log), always=True)
    start = Step("docker engine", lambda log: start_engine(bed, log), always=True)
    run_steps([engine.install_step(bed), registry, start, *standins.steps(bed)], bed)
    share_tools(own, Bed(bed.root / "bed", local=False))


def down() -> None:
    """Stop the engine and the registry and remove the network. Their data stay."""
    bed = machine(bed_root())
    engine.stop_processes(bed, ("dockerd", "containerd", "registry"))
    network.down()
    print(f"the mirror is down; its images stay in {bed.root}")


def main(words: Sequence[str]) -> int:
    try:
        match list(words):
            case ["up"]:
                up()
            case ["inside"] if network.inside():
                up_inside()
            case ["down"]:
                down()
            case ["run", *command] if command:
                env = environment(machine(bed_root()))
                return subprocess.run(network.enter(command), env=env).returncode
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except subprocess.CalledProcessError as error:
        return error.returncode
    except BedError as error:
        return report_error("mirror", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
