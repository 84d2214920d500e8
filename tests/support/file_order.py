"""The order in which files of tests begin.

`make test-unit` and its siblings give each file to one of several processes. A long file that begins last
would run alone, and all other processes would wait for it. pytest's own order knows the number of tests of
a file, not their time, so the Makefile switches it off (`--no-loadscope-reorder`).
"""

from __future__ import annotations

LONGEST_FIRST = (
    "e2e/test_lost_pods.py",
    "integration/test_evictions.py",
    "e2e/test_bad_input.py",
    "frameworks/test_accelerate.py",
    "e2e/test_lost_processes.py",
    "integration/operator/test_api_faults.py",
    "integration/test_demo_local.py",
    "integration/recipes/test_recipes.py",
    "e2e/test_resized_job.py",
    "core/node/test_node_every_call.py",
    "integration/test_status_of_loops.py",
    "frameworks/test_transformers.py",
    "integration/launcher/test_torchrun.py",
    "integration/reshard/test_reshard_gangs.py",
    "integration/launcher/test_kill_and_resume.py",
    "integration/launcher/test_several_nodes.py",
    "frameworks/test_megatron.py",
    "integration/operator/test_elastic.py",
    "integration/operator/test_deaths_at_writes.py",
    "integration/folder_store/test_killed_trainings.py",
    "trainer_sdk/directory/test_directory_every_call.py",
    "frameworks/test_accelerate_launch.py",
    "integration/operator/test_lost_members.py",
    "integration/test_install_page.py",
    "operator/decide/test_convergence.py",
    "trainer_sdk/directory/test_folder_streams.py",
    "frameworks/test_lightning.py",
    "integration/launcher/test_pod_rounds.py",
    "trainer_sdk/test_peek.py",
    "integration/sidecars/test_sidecars_full.py",
    "integration/test_spares.py",
    "integration/operator/test_many_failures.py",
    "trainer_sdk/test_roll_back.py",
    "integration/sidecars/test_sidecars_reshard.py",
)
"""Files below tests/ of more than 30 s on two cores, by their time. One that is missing costs only time."""

_PLACES = {path: place for place, path in enumerate(LONGEST_FIRST)}


def place_of(path: str) -> int:
    """Return the place of a file, whose path below tests/ is given, among all files."""
    return _PLACES.get(path, len(_PLACES))
