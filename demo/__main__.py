"""`python -m demo cluster` and `python -m demo local`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.story import StoryFailed, Teller, Timing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("stage", choices=["cluster", "local"])
    parser.add_argument("--picture", type=Path, default=None, help="where the PNG goes")
    arguments = parser.parse_args()
    picture = arguments.picture or Path("build") / f"demo-{arguments.stage}.png"
    if arguments.stage == "cluster":
        return _cluster(picture)
    return _local(picture)


def _cluster(picture: Path) -> int:
    from demo.cluster import ClusterStage, wait_nodes_ready

    stage = ClusterStage()
    try:
        wait_nodes_ready(stage.kube)
        title = "Holdfast on a kind cluster: 4 workers, GPT on text, four failures"
        return _tell(Teller(stage, title, picture, Timing()))
    finally:
        stage.close()


def _local(picture: Path) -> int:
    from demo.local import LocalStage

    stage = LocalStage()
    try:
        title = "Holdfast as processes on this machine: 4 workers, GPT on text, four failures"
        return _tell(Teller(stage, title, picture, Timing()))
    finally:
        stage.close()


def _tell(teller: Teller) -> int:
    try:
        return 0 if teller.tell() else 1
    except StoryFailed as failure:
        print(f"the demo did not go on: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
