"""What a command line names: a folder, a store or an object of the cluster, and maybe one step. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from holdfast_cli.errors import NotFound, UsageError

SYNTAX = (
    "A TARGET is a folder (/x, ./x, ../x, ~/x or .), the URL of a store (s3://, az:// or gs://), or an "
    "object of the cluster: job/NAME, checkpoint/NAME or store/NAME. @STEP behind it names one checkpoint "
    "of it."
)
PLAIN_WORDS = {
    "kubectl holdfast": "A plain word is a job, or a checkpoint where no job has the name.",
    "holdfast": "A plain word is the folder of this name if there is one, else a job or a checkpoint.",
}
"""What a TARGET without a slash is, in each of the programs."""

Program = Literal["kubectl holdfast", "holdfast"]
"""The name by which a person has started the command line."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_PATH = re.compile(r"(/|\.{1,2}(/|$)|~)")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MAX_DIGITS = 18


class Kind(StrEnum):
    """Kinds of objects of the cluster."""

    JOB = "job"
    """A TrainingJob or a CheckpointAdoption."""
    CHECKPOINT = "checkpoint"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class FolderTarget:
    """A folder of checkpoints, or a directory that serves as a store."""

    place: str
    step: int | None = None

    def __str__(self) -> str:
        return _with_step(self.place, self.step)


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """A store, or one training in it."""

    place: str
    """Its URL."""
    step: int | None = None

    def __str__(self) -> str:
        return _with_step(self.place, self.step)


@dataclass(frozen=True, slots=True)
class ClusterTarget:
    """An object of the cluster."""

    name: str
    kind: Kind | None = None
    """None where the command line does not say it."""
    step: int | None = None

    def __str__(self) -> str:
        return _with_step(self.name if self.kind is None else f"{self.kind}/{self.name}", self.step)


PlaceTarget = FolderTarget | StoreTarget
Target = FolderTarget | StoreTarget | ClusterTarget


def split_step(text: str) -> tuple[str, int | None]:
    """Split `PLACE@STEP`. A text without a number behind its last @ is a place with an @ in its name."""
    place, at, step = text.rpartition("@")
    if at and place and step.isascii() and step.isdigit() and len(step) <= _MAX_DIGITS:
        return place, int(step)
    return text, None


def parse_target(text: str, program: Program, exists: Callable[[str], bool]) -> Target:
    """Return what a text names.

    Args:
        text: A word of the command line.
        program: In `holdfast` a word that could be both is a folder if it exists.
        exists: Whether a path exists here.

    Raises:
        UsageError: It can be nothing of the three.
        NotFound: It can only be a folder, and there is none.
    """
    word, step = split_step(text)
    if not word.strip() or "\0" in word:
        raise UsageError(f"{text!r} names nothing. {SYNTAX}")
    if _URL.match(word):
        return StoreTarget(word, step)
    if _PATH.match(word):
        return FolderTarget(word, step)
    kind, slash, name = word.partition("/")
    if slash and kind in tuple(Kind):
        return ClusterTarget(_checked(name, text), Kind(kind), step)
    if program == "holdfast" and exists(word):
        return FolderTarget(word, step)
    if not slash:
        return ClusterTarget(_checked(word, text), None, step)
    if program == "holdfast":
        raise NotFound(
            f"there is no folder {word} here, and objects of the cluster are job/NAME, checkpoint/NAME and "
            "store/NAME"
        )
    raise UsageError(
        f"{text}: objects of the cluster are job/NAME, checkpoint/NAME and store/NAME; write ./{word} for a "
        "folder"
    )


def local_path(text: str) -> Path:
    """Return a path of this machine. Where it begins with the home of an unknown user, it does not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def named(target: Target, verb: str, kinds: tuple[Kind, ...], instead: str) -> ClusterTarget:
    """Return the target if it may be an object of one of these kinds.

    Args:
        target: What the command line names.
        verb: The verb.
        kinds: The kinds to which the verb applies.
        instead: What to do with a folder or a store, as a sentence without a full stop.

    Raises:
        UsageError: It is another kind of target.
    """
    wanted = " or ".join(f"{kind}/NAME" for kind in kinds)
    if not isinstance(target, ClusterTarget):
        what = "folder" if isinstance(target, FolderTarget) else "store"
        raise UsageError(
            f"{verb} does not apply to the {what} {target}: expected {wanted}. {instead}"
        )
    if target.kind is not None and target.kind not in kinds:
        raise UsageError(f"{verb} does not apply to {target}: expected {wanted}")
    return target


def without_step(target: ClusterTarget, verb: str) -> ClusterTarget:
    """Return the target. Raises UsageError if it names a step, which has no meaning for the verb."""
    if target.step is not None:
        raise UsageError(f"{verb} does not take a step: omit @{target.step}")
    return target


def _with_step(text: str, step: int | None) -> str:
    return text if step is None else f"{text}@{step}"


def _checked(name: str, text: str) -> str:
    if _NAME.fullmatch(name) is None:
        hint = f"; write ./{text} for a folder" if "/" not in text else ""
        raise UsageError(
            f"{text}: {name!r} is no name of an object of the cluster: expected lower-case letters, digits, "
            f"- and .{hint}"
        )
    return name
