"""Which releases of a framework an adapter warns about."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from holdfast.integrations.versions import ALSO_TESTED, TESTED, installed_version, untested

LOCK = Path(__file__).parents[3] / "tests" / "frameworks" / "uv.lock"


@pytest.mark.parametrize("installed", ["5.23.0", "5.23.4", "5.23.0+cpu"])
def test_a_bug_fix_and_a_local_build_of_the_tested_release_need_no_warning(installed: str) -> None:
    assert untested("transformers", installed) is None


@pytest.mark.parametrize("installed", ["4.57.1", "5.2.3", "5.24.0", "6.23.0", "5.24.0.dev0"])
def test_the_warning_about_another_release_names_both_versions(installed: str) -> None:
    message = untested("transformers", installed)
    assert installed in message
    assert TESTED["transformers"] in message


def test_a_release_that_was_tested_in_another_environment_needs_no_warning() -> None:
    assert untested("megatron-core", ALSO_TESTED["megatron-core"]) is None
    assert untested("megatron-core", "0.17.0") is not None


def test_a_module_without_metadata_gets_a_warning() -> None:
    assert installed_version("holdfast-no-such-distribution") is None
    message = untested("transformers", None)
    assert "no version number" in message


def test_the_tested_versions_are_those_of_the_lock_file() -> None:
    locked = {
        package["name"]: package["version"]
        for package in tomllib.loads(LOCK.read_text())["package"]
        if package["name"] in TESTED
    }
    assert locked == dict(TESTED)
