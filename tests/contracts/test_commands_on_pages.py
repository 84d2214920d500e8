"""Pages and messages name only verbs and options of the command line that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from holdfast_cli.program import VERBS, cli

ROOT = Path(__file__).resolve().parents[2]
OF_THE_SDK = ("run", "version")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted(
    path
    for member in ("core", "operator", "sidecar", "trainer_sdk", "cli")
    for path in (ROOT / member / "src").rglob("*.py")
)
_COMMAND = re.compile(
    r"(?:^|[`$(] ?)(?:kubectl[ -])?holdfast ([a-z][a-z-]*)((?: [^`\n|#]*)?)", re.MULTILINE
)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_VERB = re.compile(r"kubectl holdfast ([a-z][a-z-]*)")
_OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-[A-Za-z])(?![\w-])")


@cache
def options(verb: str) -> frozenset[str]:
    parameters = [*VERBS[verb].load().params, *cli.params]
    return frozenset(name for one in parameters for name in one.opts) | {"-h", "--help"}


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yield verb and further words of each command in the code of a page."""
    for code in _CODE.findall(page.read_text()):
        for verb, words in _COMMAND.findall(code):
            if verb not in OF_THE_SDK:
                yield verb, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_verbs_and_options_that_exist(page: Path) -> None:
    for verb, words in commands(page):
        assert verb in VERBS, f"{page.name} names `holdfast {verb}`"
        unknown = set(_OPTION.findall(words)) - options(verb)
        assert not unknown, f"{page.name}: `holdfast {verb}{words}`: {sorted(unknown)}"


def test_messages_name_verbs_that_exist() -> None:
    for path in SOURCES:
        for verb in _VERB.findall(path.read_text()):
            assert verb in VERBS, f"{path.relative_to(ROOT)} names `kubectl holdfast {verb}`"


def test_the_pages_name_most_verbs() -> None:
    """Otherwise the patterns above find nothing."""
    assert {verb for page in PAGES for verb, _ in commands(page)} >= VERBS.keys() - {"import"}


def test_each_option_of_each_verb_has_help() -> None:
    for verb in VERBS:
        for one in VERBS[verb].load().params:
            assert not isinstance(one, click.Option) or one.help, (verb, one.name)
