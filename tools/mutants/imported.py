"""Plugin for pytest that fails the run unless a module comes from a given folder.

Otherwise the tests might import the code of the checkout, and a mutant that no test ever ran would look like
one that no test finds.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

MODULE, FOLDER = "MUTANTS_MODULE", "MUTANTS_FOLDER"
WRONG_MODULE = 70
"""Exit status of pytest if the module does not come from the folder."""


def settings(module: str, folder: Path) -> Mapping[str, str]:
    """Return the environment variables of this plugin."""
    return {MODULE: module, FOLDER: str(folder)}


def pytest_collection_finish() -> None:
    module, folder = os.environ[MODULE], Path(os.environ[FOLDER])
    found = importlib.util.find_spec(module)
    origin = None if found is None else found.origin
    if origin is None or not Path(origin).is_relative_to(folder):
        pytest.exit(
            f"the tests import {module} from {origin}, expected a file below {folder}", WRONG_MODULE
        )
