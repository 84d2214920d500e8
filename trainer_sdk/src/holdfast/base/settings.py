"""The environment of a rank: what a launcher told this process, read in one place.

The launcher writes these variables with `rank_environment`, a rank reads them with
`RankSettings.from_env`; a round-trip test keeps the two in step. torchrun's names are kept, so that
scripts and libraries that know torchrun work unchanged. Nothing else in the SDK reads or writes the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_core.errors import ConfigError
from holdfast_core.ids import Rank, RestartRound, Step

ENV_ROUND = "HOLDFAST_ROUND"
"""Restart round of this rank process (the pod's birth round may be older)."""
ENV_INTERVAL_STEPS = "HOLDFAST_INTERVAL_STEPS"
"""The round's save interval; the same for every rank, which is what makes it agreed."""
ENV_RESTORE_STEP = "HOLDFAST_RESTORE_STEP"
"""Step that this round starts from; "" where there is nothing to restore."""
ENV_STORE_SECRET = "HOLDFAST_STORE_SECRET"
"""With it ranks of a round sign what they put into the gang's store. Never written to the store."""
ENV_SCRATCH_DIR = "HOLDFAST_SCRATCH_DIR"
"""Directory in shared memory that the launcher owns and removes (standalone only)."""

SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Must be set before torch is imported: a fork server may not own a thread pool."""


_FIRST_RANK = Rank(0)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Who this process is within the gang."""

    rank: Rank = _FIRST_RANK
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = ""
    master_port: int = 0
    round: RestartRound | None = None
    """None: started by neither `holdfast run` nor torchrun (whose restart count is as good)."""
    interval_steps: int | None = None
    restore_step: Step | None = None
    """None: nothing to restore, or not told; see `restore_known`."""
    restore_known: bool = False
    scratch_dir: str | None = None
    agent_store: bool = False
    """A launcher hosts the store at the master address: every rank connects to it as a client."""
    store_secret: str | None = field(default=None, repr=False)
    """None: started by a launcher that gives none, such as torchrun."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RankSettings:
        """Raises ConfigError when a variable is no whole number, or world size and rank disagree."""
        source = os.environ if env is None else env
        round_ = _int(source, ENV_ROUND)
        if round_ is None:
            round_ = _int(source, "TORCHELASTIC_RESTART_COUNT")
        restore = source.get(ENV_RESTORE_STEP)
        settings = cls(
            rank=Rank(_int(source, "RANK") or 0),
            world_size=_int(source, "WORLD_SIZE") or 1,
            local_rank=_int(source, "LOCAL_RANK") or 0,
            local_world_size=_int(source, "LOCAL_WORLD_SIZE") or 1,
            master_address=source.get("MASTER_ADDR", ""),
            master_port=_int(source, "MASTER_PORT") or 0,
            round=None if round_ is None else RestartRound(round_),
            interval_steps=_int(source, ENV_INTERVAL_STEPS),
            restore_step=Step(int(restore)) if restore else None,
            restore_known=restore is not None,
            scratch_dir=source.get(ENV_SCRATCH_DIR) or None,
            agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store_secret=source.get(ENV_STORE_SECRET) or None,
        )
        if not 0 <= settings.rank < settings.world_size:
            raise ConfigError(
                f"RANK={settings.rank} does not lie in a world of WORLD_SIZE={settings.world_size}: "
                "start the ranks by `holdfast run` or torchrun, which set both"
            )
        return settings


_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def rank_environment(
    settings: RankSettings, *, group_rank: int, run_id: str, max_restarts: int = 0
) -> dict[str, str]:
    """Variables that the launcher adds to a rank's environment: all that torchrun sets, and ours.

    `max_restarts`: of a standalone run. In a pod the operator counts, and the launcher does not know its
    limit: the variable is then at least the number of the restart. All ranks have one role.

    TORCHELASTIC_USE_AGENT_STORE makes `init_process_group` (env://) a client of the round's store
    instead of letting rank 0 host one. Every round has a store process of its own, so that no key
    of an older round can be seen.
    """
    env = {
        "RANK": str(settings.rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_RANK": str(settings.local_rank),
        "LOCAL_WORLD_SIZE": str(settings.local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(settings.world_size // settings.local_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(settings.rank),
        "ROLE_WORLD_SIZE": str(settings.world_size),
        "MASTER_ADDR": settings.master_address,
        "MASTER_PORT": str(settings.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(settings.round or 0),
        "TORCHELASTIC_MAX_RESTARTS": str(max(max_restarts, settings.round or 0)),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Distributions build torch without libuv, and asking for it then is an error. Heard by torch
        # after 2.6; for 2.6 see tcp_store.
        "USE_LIBUV": "0",
        _NCCL_ERRORS: os.environ.get(_NCCL_ERRORS, "1"),
    }
    if settings.round is not None:
        env[ENV_ROUND] = str(settings.round)
    if settings.interval_steps is not None:
        env[ENV_INTERVAL_STEPS] = str(settings.interval_steps)
    if settings.restore_known:
        env[ENV_RESTORE_STEP] = "" if settings.restore_step is None else str(settings.restore_step)
    if settings.store_secret is not None:
        env[ENV_STORE_SECRET] = settings.store_secret
    if settings.scratch_dir is not None:
        env[ENV_SCRATCH_DIR] = settings.scratch_dir
    return env


def current_environment() -> dict[str, str]:
    """A copy of this process's environment, for a child."""
    return dict(os.environ)


def apply_environment(env: Mapping[str, str]) -> None:
    """Set variables in this process (a forked rank, before the user's code runs)."""
    os.environ.update(env)


def single_thread_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with one thread for every maths library that the user did not set up himself."""
    return {**SINGLE_THREAD, **env}


def _int(source: Mapping[str, str], name: str) -> int | None:
    raw = source.get(name)
    if raw is None or raw == "":
        return None
    try:
        return int(raw)
    except ValueError as error:
        raise ConfigError(f"{name}={raw!r}: expected a whole number") from error
