"""Every recipe of docs/recipes.md, unchanged: run without interruption, and killed and run again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.trainer.launched import committed_step

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/recipes.md"
WRAPPED = Path(__file__).with_name("wrapped.py")
KILL_AFTER = 25
SAVED = 20

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]  # torch.compile compiles C++


@dataclass(frozen=True)
class Recipe:
    title: str
    code: str
    command: str


def recipes() -> list[Recipe]:
    found = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        code = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        command = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        assert (len(code), len(command)) == (1, 1), f"section {title}: one script, one command"
        found.append(Recipe(title, code[0], command[0].strip()))
    return found


def run(recipe: Recipe, folder: Path, kill_after: int = 0) -> tuple[int, dict[str, str], int]:
    """Return the exit code, the digest of each rank, and the number of optimizer steps of this run."""
    folder.mkdir(exist_ok=True)
    shutil.copy(WRAPPED, folder / "train.py")
    (folder / "recipe.py").write_text(recipe.code)
    program, *arguments = shlex.split(recipe.command)
    script = [] if program == "python" else [str(Path(sys.executable).with_name(program))]
    done = zygote.run(
        [sys.executable, *script, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "KILL_AFTER": str(kill_after),
            "SAVED": str(SAVED),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "err.log").write_text(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = max((line["steps"] for line in lines), default=0)
    return done.returncode, {line["rank"]: line["digest"] for line in lines}, steps


@pytest.mark.fault("A user kills a recipe and runs it again")
@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: recipe.title)
def test_a_recipe_that_was_killed_ends_in_the_bits_of_one_that_was_not(
    recipe: Recipe, tmp_path: Path
) -> None:
    code, calm, all_steps = run(recipe, tmp_path / "calm")
    assert code == 0, (tmp_path / "calm/err.log").read_text()
    assert calm
    assert all_steps > KILL_AFTER

    folder = tmp_path / "killed"
    code, _, _ = run(recipe, folder, KILL_AFTER)
    assert code != 0
    code, digests, steps = run(recipe, folder)
    assert code == 0, (folder / "err.log").read_text()
    assert digests == calm
    assert steps == all_steps - SAVED
    assert committed_step(folder / "ckpt") > SAVED
