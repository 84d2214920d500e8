"""The recipes for trackers: a training that is killed draws one clean curve."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.kills import Trained
from tests.support.frameworks.pages import PAGES

STEPS = 30
PRELOAD = ["torch.utils.tensorboard", "mlflow", "wandb", "holdfast.checkpointer"]
# MLflow reads it when a store is opened: here, and in the processes of the scripts.
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

pytestmark = pytest.mark.timeout(600)


def run(title: str, folder: Path, kills: int, **options: int) -> Trained:
    """Run the script of a section of the page, and kill it."""
    section = re.split(r"^## ", (PAGES / "trackers.md").read_text(), flags=re.MULTILINE)
    (text,) = [one for one in section if one.startswith(f"{title}\n")]
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(code)
    drawn = {"seed": 2, "least_steps": 6, "most_steps": 9, **options}
    training = Training(folder, kills=kills, **drawn)
    (trained,) = train_forked(script, [training], preload=PRELOAD)
    assert max(trained.starts) > 1
    return trained


def records_of(file: Path) -> Iterator[bytes]:
    """Yield the records of an offline run of W&B: LevelDB's log format after a header of 7 bytes.

    A record is cut into parts where a block of 32 KiB ends. A kill may have cut off the last one.
    """
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + 7 : place + 7 + length]
        if kind == 0 or len(part) < length:
            return
        parts += part
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.fault("A training that writes to TensorBoard is killed and repeats steps")
def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = run(
        "TensorBoard", tmp_path / "run", 3, seed=6, least_steps=2, kills_without_checkpoint=1
    )
    assert trained.starts[:2] == (1, 1), "the first start is killed before its first save"
    events = EventAccumulator(str(tmp_path / "run/runs")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(STEPS))


def test_wandb_gets_one_run_whose_repeated_steps_are_equal(tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    trained = run("W&B", tmp_path / "run", 1)
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == len(trained.starts)
    assert len({file.name for file in files}) == 1  # named by the run
    curve: dict[int, set[str]] = {}
    for file in files:
        for data in records_of(file):
            record = Record()
            record.ParseFromString(data)
            items = record.history.item
            row = {item.key or item.nested_key[0]: item.value_json for item in items}
            if "loss" in row:
                curve.setdefault(int(row["_step"]), set()).add(row["loss"])
    # The process that was killed may not have written its last values.
    assert set(range(trained.starts[-1] - 1, STEPS)) <= set(curve) <= set(range(STEPS))
    assert all(len(values) == 1 for values in curve.values())


def test_mlflow_gets_one_run_with_each_step_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run("MLflow", tmp_path / "run", 2)
    client = MlflowClient(f"file:{tmp_path}/run/mlruns")
    experiment = client.get_experiment_by_name("example")
    assert experiment is not None
    (one,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(one.info.run_id, "loss")
    assert sorted(value.step for value in history) == list(range(STEPS))
    assert one.info.status == "FINISHED"
