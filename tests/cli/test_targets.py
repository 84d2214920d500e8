"""Each word of a command line names a folder, a store or an object of the cluster, in the same way always."""

from __future__ import annotations

import pytest

from holdfast_cli.errors import NotFound, UsageError
from holdfast_cli.targets import (
    ClusterTarget,
    FolderTarget,
    Kind,
    StoreTarget,
    Target,
    named,
    parse_target,
    without_step,
)

FOLDERS = frozenset({"ckpt", "runs/a", "model.pt"})


def parse(text: str, program: str = "holdfast") -> Target:
    return parse_target(text, program, FOLDERS.__contains__)  # type: ignore[arg-type]  # a literal


@pytest.mark.parametrize("program", ["holdfast", "kubectl holdfast"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run-7", StoreTarget("s3://bucket/run-7")),
        ("s3://bucket/run-7@40", StoreTarget("s3://bucket/run-7", 40)),
        ("file:///mnt/store", StoreTarget("file:///mnt/store")),
        ("/mnt/ckpt", FolderTarget("/mnt/ckpt")),
        ("./ckpt@40", FolderTarget("./ckpt", 40)),
        ("../ckpt", FolderTarget("../ckpt")),
        ("~/ckpt", FolderTarget("~/ckpt")),
        (".", FolderTarget(".")),
        (".@7", FolderTarget(".", 7)),
        ("./me@home", FolderTarget("./me@home")),
        ("job/gpt", ClusterTarget("gpt", Kind.JOB)),
        ("job/gpt@40", ClusterTarget("gpt", Kind.JOB, 40)),
        ("checkpoint/gpt-s40-r0", ClusterTarget("gpt-s40-r0", Kind.CHECKPOINT)),
        ("store/main", ClusterTarget("main", Kind.STORE)),
        ("gpt", ClusterTarget("gpt")),
        ("gpt@40", ClusterTarget("gpt", None, 40)),
    ],
)
def test_a_word_with_one_meaning(text: str, expected: Target, program: str) -> None:
    assert parse(text, program) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ckpt", FolderTarget("ckpt")),
        ("ckpt@40", FolderTarget("ckpt", 40)),
        ("runs/a", FolderTarget("runs/a")),
        ("model.pt", FolderTarget("model.pt")),
    ],
)
def test_a_plain_word_is_a_folder_only_in_holdfast_and_only_if_it_exists(
    text: str, expected: Target
) -> None:
    assert parse(text) == expected


def test_a_plain_word_of_kubectl_is_an_object_although_a_folder_has_the_name() -> None:
    assert parse("ckpt", "kubectl holdfast") == ClusterTarget("ckpt")
    with pytest.raises(UsageError, match=r"write \./runs/a for a folder"):
        parse("runs/a", "kubectl holdfast")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", UsageError, "names nothing"),
        ("runs/b", NotFound, "there is no folder runs/b here"),
        ("job/", UsageError, "no name of an object"),
        ("job/../secrets", UsageError, "no name of an object"),
        ("Runs", UsageError, r"write \./Runs for a folder"),
        ("gpt@newest", UsageError, "no name of an object"),
    ],
)
def test_what_names_nothing_is_refused(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        parse(text)


def test_a_verb_that_does_not_apply_says_what_to_use_instead() -> None:
    jobs = (Kind.JOB,)
    assert named(ClusterTarget("gpt"), "save", jobs, "") == ClusterTarget("gpt")
    for target, kind in ((FolderTarget("./a"), "folder"), (StoreTarget("s3://b/c"), "store")):
        with pytest.raises(
            UsageError, match=f"save does not apply to the {kind} .*job/NAME. Do so"
        ):
            named(target, "save", jobs, "Do so")
    with pytest.raises(UsageError, match="does not apply to store/main: expected job/NAME"):
        named(ClusterTarget("main", Kind.STORE), "save", jobs, "Do so")
    with pytest.raises(UsageError, match="omit @4"):
        without_step(ClusterTarget("gpt", None, 4), "save")
