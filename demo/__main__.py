"""`python -m demo local` (`make demo`) and `python -m demo cluster` (`make demo-kind`)."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from pathlib import Path

from demo.story import Teller
from demo.waits import DemoFailed

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
LOCAL_IS = "real: operator's decisions, sidecars, ranks, store; simulated: Kubernetes"
"""What the demo on this machine shows, and what only `make demo-kind` shows."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("stage", choices=["cluster", "local"])
    parser.add_argument("--picture", type=Path, default=None, help="path of the PNG")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build/demo-local",
        help="folder for the files of `local`",
    )
    parser.add_argument(
        "--steps", type=int, default=None, help="number of training steps of `local`"
    )
    arguments = parser.parse_args()
    picture = arguments.picture or Path("build") / f"demo-{arguments.stage}.png"
    # SIGTERM interrupts the demo as Ctrl-C does. SIGINT needs a handler too, because a shell starts
    # background jobs with SIGINT ignored.
    for interrupting in (signal.SIGINT, signal.SIGTERM):
        signal.signal(interrupting, signal.default_int_handler)
    log = picture.with_suffix(".log")
    try:
        if arguments.stage == "cluster":
            return _cluster(picture)
        return _local(picture, arguments.folder.resolve(), arguments.steps)
    except KeyboardInterrupt:
        print("The demo was interrupted. All of its processes have ended.", file=sys.stderr)
        return INTERRUPTED
    except DemoFailed as failure:
        print(f"The demo stopped. {failure}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - the user sees three lines, the log has the traceback
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(traceback.format_exc())
        first = str(error).partition("\n")[0]
        print(
            f"The demo stopped. {DemoFailed(f'{type(error).__name__} ended it.', first, str(log))}",
            file=sys.stderr,
        )
    return 1


def _cluster(picture: Path) -> int:
    from testbed.driver.kube import Kube

    from demo.cluster import ClusterStage, wait_nodes_ready

    kube = Kube()
    wait_nodes_ready(kube)
    stage = ClusterStage(kube)
    try:
        title = "Holdfast on a kind cluster: 4 workers, a small GPT, four failures"
        return 0 if Teller(stage, title, picture).tell() else 1
    except KeyboardInterrupt:
        stage.delete_jobs()
        raise
    finally:
        stage.close()


def _local(picture: Path, folder: Path, steps: int | None) -> int:
    from demo.leftovers import Claim
    from demo.local import STEPS, LocalStage, memory_of

    with Claim(folder, memory_of(folder)):
        stage = LocalStage(folder, STEPS if steps is None else steps)
        try:
            print(LOCAL_IS, flush=True)
            title = "Holdfast on this machine: 4 workers, a small GPT, four failures"
            return 0 if Teller(stage, title, picture).tell() else 1
        finally:
            stage.close()


if __name__ == "__main__":
    sys.exit(main())
