"""The verbs that read and manage checkpoints, on a folder and on a store: text, documents and exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.tiers.stored_checkpoints import store_step, values

import holdfast
from holdfast_cli import progress
from holdfast_cli.program import run
from holdfast_cli.pruning import Rules
from holdfast_core.retention import BestMode, KeepBest, RetentionPolicy
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the steps 1 to 4, which nothing of this module changes."""
    return fill(tmp_path_factory.mktemp("saved") / "ckpt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "ckpt")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store with the steps 1 to 3 of a TrainingJob."""
    root = tmp_path / "store"
    root.mkdir()
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        made = [store_step(tier, tmp_path, step, values(step)) for step in (1, 2, 3)]
    yield root
    for one in made:
        one.close()


def fill(place: Path) -> Path:
    with holdfast.Checkpointer(holdfast.Folder(place, keep_last=9), when_busy="wait") as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.report(loss=1 / step)
            state = {"model": {"w": np.full(4, float(step)), "frozen": np.ones(3)}}
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
    return place


def command(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run `holdfast`. Return the exit code, and what it prints."""
    code = run([str(word) for word in words], "holdfast")
    out, err = capsys.readouterr()
    return code, out, err


def test_a_folder_is_listed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "list", saved)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["STEP", "ROUND", "SIZE", "RANKS", "SAVED", "PINNED"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "4"]
    code, out, _ = command(capsys, "list", saved, "-o", "wide")
    assert "loss=0.25" in out.splitlines()[4]
    code, out, _ = command(capsys, "list", saved, "-o", "json")
    document = json.loads(out)
    assert [one["step"] for one in document] == [1, 2, 3, 4]
    assert document[0].keys() == {
        "training",
        "step",
        "round",
        "saved_at",
        "ranks",
        "stored_bytes",
        "pinned",
    }


def test_all_trainings_of_a_store_are_listed(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = store / "team-b/uid-2/manifests/s000000000009"
    other.mkdir(parents=True)
    (other / "r000000.json").write_text("{}")
    code, out, _ = command(capsys, "list", store)
    assert code == 0
    assert out.splitlines()[0].startswith("TRAINING")
    assert [line.split()[0].rsplit("/", 2)[1] for line in out.splitlines()[1:]] == [
        "team-a",
        "team-a",
        "team-a",
        "team-b",
    ]


def test_a_checkpoint_is_shown(
    saved: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "show", f"{saved}@2", "--tensors", "*.w")
    assert code == 0
    assert "loss           0.5" in out
    assert "model.w  [4]    float64   32 B" in out
    assert "model.frozen" not in out
    assert "1 tensors do not match *.w" in out
    code, out, _ = command(capsys, "show", store, "-o", "json")
    document = json.loads(out)
    assert (document["step"], document["tier"], document["world_size"]) == (3, "store", 4)
    assert document["job"] == "team-a/gpt-small"


def test_a_checkpoint_of_a_store_without_a_shard_is_passed_over_as_a_restore_does(
    store: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for shard in store.rglob("s000000000003-*/rank000000-*"):
        shard.unlink()
    code, out, _ = command(capsys, "show", store, "-o", "json")
    assert (code, json.loads(out)["step"]) == (0, 2)
    assert "step 3 is passed over: the shards of ranks [0" in caplog.text


def test_two_checkpoints_are_compared(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "diff", f"{saved}@1", f"{saved}@3")
    assert code == 0
    assert out.splitlines()[2].split() == ["model.w", "changed", "32", "B", "4", "2"]
    assert "tensors: 0 added, 0 removed, 0 reshaped, 1 changed, 1 equal" in out
    assert command(capsys, "diff", f"{saved}@1", f"{saved}@3", "--exit-code")[0] == 7
    assert command(capsys, "diff", f"{saved}@1", f"{saved}@1", "--exit-code")[0] == 0
    words = ("diff", f"{saved}@1", f"{saved}@3", "--tensors", "*.frozen", "--exit-code")
    assert command(capsys, *words)[0] == 0
    code, out, _ = command(capsys, "diff", f"{saved}@1", f"{saved}@3", "-o", "json")
    document = json.loads(out)
    assert document["equal"] is False
    assert document["diff"]["changes"][0]["norm"] == 4.0


def test_what_takes_long_says_how_far_it_is(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    for words in (
        ["verify", f"{saved}@4"],
        ["export", f"{saved}@4", "--format", "hf", "--to", tmp_path / "hf"],
        ["merge", f"{saved}@3", f"{saved}@4", "--method", "mean", "--to", tmp_path / "mean"],
        ["diff", f"{saved}@3", f"{saved}@4"],
    ):
        code, _, err = command(capsys, *words)
        assert code == 0, err
        assert "ing: 100% of " in err.splitlines()[-1], "a log shows it, if it takes ten seconds"


def test_a_folder_is_pruned_and_pins_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "pin", f"{folder}@1")[0] == 0
    code, out, _ = command(capsys, "prune", folder, "--keep-last", "2", "--dry-run")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["2"]
    assert "keep 3: 2 one of the newest (keepLast), 1 pinned" in out
    code, _, err = command(capsys, "prune", folder, "--keep-last", "2")
    assert code == 2
    assert "Add --yes to delete" in err
    code, _, err = command(capsys, "prune", folder, "--keep-last", "2", "--yes")
    assert (code, err.splitlines()[-1]) == (0, "deleted 1 checkpoint")
    assert steps(folder) == (1, 3, 4)
    assert command(capsys, "unpin", f"{folder}@1")[0] == 0
    assert command(capsys, "prune", folder, "--keep-last", "1", "-y", "-o", "json")[0] == 0
    assert steps(folder) == (4,)


def test_the_store_of_a_job_is_pruned_only_where_its_training_is_over(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("prune", store, "--keep-last", "1")
    code, out, err = command(capsys, *words, "--dry-run")
    assert code == 0
    assert "prune 2 checkpoints" in out
    assert "note: " in err
    code, _, err = command(capsys, *words, "--yes")
    assert code == 6
    assert "`kubectl holdfast prune gpt-small -n team-a`" in err
    assert steps(store) == (1, 2, 3)
    code, _, err = command(capsys, *words, "--yes", "--training-is-over")
    assert code == 0
    assert steps(store) == (3,)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list", "./no-such"], 5, "there is no folder ./no-such"),
        (["show", "./no-such"], 5, "there is no folder ./no-such"),
        (["prune", "./no-such", "--keep-last", "2"], 5, "there is no folder ./no-such"),
        (["pin", "./no-such@1"], 5, "there is no folder ./no-such"),
        (["list", "{saved}@3"], 2, "list does not take a step"),
        (["show", "{saved}@9"], 5, "expected step 9, found steps 1, 2, 3, 4"),
        (["diff", "{saved}@1", "{saved}@9"], 5, "expected step 9"),
        (["pin", "{saved}"], 2, "expected {saved}@STEP"),
        (["pin", "{saved}@9"], 5, "expected step 9"),
        (["pin", "{store}@1"], 2, "a store keeps no marks"),
        (["unpin", "{store}@1"], 2, "a store keeps no marks"),
        (["prune", "{saved}"], 2, "needs at least one rule, as in --keep-last 3"),
        (["prune", "{saved}@3", "--daily", "1"], 2, "prune does not take a step"),
        (["prune", "{saved}", "--keep-every", "0"], 2, "expected at least one step"),
        (["prune", "{saved}", "--keep-every", "soon"], 2, "duration 'soon' cannot be read"),
        (["prune", "{saved}", "--keep-for", "0h"], 2, "expected more than 0"),
        (["prune", "{saved}", "--keep-best", "loss:best"], 2, "expected METRIC, METRIC:max"),
        (["prune", "job/gpt", "--daily", "2"], 2, "edit the spec for the others"),
        (["prune", "job/gpt", "--keep-last", "1"], 2, "a job keeps at least 2"),
        (["prune", "job/gpt", "--training-is-over"], 2, "--training-is-over is for a store"),
        (["prune", "store/main"], 2, "prune does not apply to store/main"),
    ],
)
def test_bad_input_has_its_exit_code_and_says_what_to_do(
    saved: Path,
    store: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    said: str,
) -> None:
    places: dict[str, Any] = {"saved": saved, "store": store}
    found = command(capsys, *(word.format(**places) for word in words))
    assert found[0] == code
    assert said.format(**places) in found[2]


def test_the_rules_of_the_command_line_are_those_of_every_tier() -> None:
    rules = Rules(keep_every="6h", keep_for="48h", hourly=3, daily=2, keep_best="loss:max:4")
    policy = rules.policy()
    assert policy.every is not None and policy.every.total_seconds() == 6 * 3600
    assert policy.keep_for is not None and policy.keep_for.total_seconds() == 48 * 3600
    assert (policy.keep_last, policy.hourly, policy.daily) == (2, 3, 2)
    assert policy.best == KeepBest("loss", BestMode.MAX, 4)
    assert Rules(keep_every="1000").policy() == RetentionPolicy(2, every_steps=1000)
    best = Rules(keep_last=5, keep_best="loss").policy().best
    assert best == KeepBest("loss", BestMode.MIN, 1)


def steps(place: Path) -> tuple[int, ...]:
    with holdfast.open(place) as found:
        return found.steps()


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("./model.pt", 5, "there is no file or folder ./model.pt"),
        ("model.pt", 5, "there is no file or folder model.pt"),
        ("s3://bucket/weights", 2, "copy the files to a folder from s3://bucket/weights"),
    ],
)
def test_weights_are_imported_from_a_file_or_a_folder(
    target: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["import", target, "--format", "torch", "--to", "ckpt"]
    assert run(words, "holdfast") == code
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_home_directory_is_replaced_in_outputs_as_in_targets(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert command(capsys, "export", saved, "--format=hf", "--to=~/out")[0] == 0
    assert command(capsys, "merge", saved, f"{saved}@3", "--method=mean", "--to=~/mean")[0] == 0
    assert command(capsys, "import", "~/out", "--format=hf", "--to=~/ckpt")[0] == 0
    assert command(capsys, "list", "~/ckpt")[0] == 0
    assert {path.name for path in home.iterdir()} == {"out", "mean", "ckpt"}
    assert list(tmp_path.iterdir()) == [home]


def test_an_answer_needs_a_terminal_that_is_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as in `holdfast prune ... <&-`
    code, _, err = command(capsys, "prune", folder, "--keep-last", 1)
    assert code == 2
    assert "there is no terminal to ask on" in err
