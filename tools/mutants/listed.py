"""All mutants, by place."""

from __future__ import annotations

from tools.mutants.model import Mutant
from tools.mutants.of_coordinator import OF_COORDINATOR
from tools.mutants.of_decide import OF_DECIDE
from tools.mutants.of_folder import OF_FOLDER
from tools.mutants.of_node import OF_NODE
from tools.mutants.of_state import OF_STATE
from tools.mutants.of_store import OF_STORE

MUTANTS: tuple[Mutant, ...] = (
    *OF_STATE,
    *OF_FOLDER,
    *OF_COORDINATOR,
    *OF_NODE,
    *OF_STORE,
    *OF_DECIDE,
)
