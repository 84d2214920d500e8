"""The environment variables by which a launcher configures a rank.

The launcher writes them with `rank_environment`, and a rank reads them with `RankSettings.from_env`. A
round-trip test compares the two. The names are those of torchrun, so that scripts and libraries for
torchrun work unchanged. Other parts of the SDK read these settings only through this module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast_core.contract import DEFAULT_MTBF_SECONDS
from holdfast_core.errors import ConfigError
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import Timing

ENV_ROUND = "HOLDFAST_ROUND"
"""Restart round of this rank process. The round in which the pod was created may be older."""
ENV_INTERVAL_STEPS = "HOLDFAST_INTERVAL_STEPS"
"""Save interval of the round, in optimizer steps. Every rank of the round has the same value."""
ENV_INTERVAL_SECONDS = "HOLDFAST_INTERVAL_SECONDS"
"""Save interval of the round in seconds, or "auto". The interval in steps is then 0."""
ENV_MTBF_SECONDS = "HOLDFAST_MTBF_SECONDS"
"""Mean time between failures that an automatic interval expects."""
ENV_RESTORE_STEP = "HOLDFAST_RESTORE_STEP"
"""Step that this round starts from; "" where there is nothing to restore."""
ENV_ROLLED_BACK_FROM = "HOLDFAST_ROLLED_BACK_FROM"
"""Step that the gang had reached before a person rolled it back. Absent: this round starts from that step or
a later one, or the gang was never rolled back."""
ENV_STORE_SECRET = "HOLDFAST_STORE_SECRET"
"""Secret with which the ranks of a round sign their values in the gang's store. It is never stored there."""
ENV_SCRATCH_DIR = "HOLDFAST_SCRATCH_DIR"
"""Directory in shared memory that the launcher of a standalone run owns and removes."""

SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""These must be set before torch is imported, because a fork server must not own a thread pool."""


_FIRST_RANK = Rank(0)
_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Identity and settings of this process within the gang."""

    rank: Rank = _FIRST_RANK
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = ""
    master_port: int = 0
    round: RestartRound | None = None
    """Restart round. With torchrun it is torchrun's restart count. None: neither `holdfast run` nor
    torchrun started this process."""
    interval_steps: int | None = None
    timing: Timing | None = None
    """The interval as a time. None: it is a number of steps."""
    restore_step: Step | None = None
    """Step to restore. None: there is nothing to restore, or the launcher did not say; see
    `restore_known`."""
    restore_known: bool = False
    """Whether the launcher set `restore_step`, also if there is nothing to restore."""
    rolled_back_from: Step | None = None
    """Step that the gang had reached before a person rolled it back below it."""
    scratch_dir: str | None = None
    agent_store: bool = False
    """Whether a launcher hosts the store at the master address. Every rank is then its client."""
    store_secret: str | None = field(default=None, repr=False)
    """Secret of the round. None: the launcher provides none, as with torchrun."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> RankSettings:
        """Read the settings from `env`, or from the process's environment.

        Raises ConfigError when a variable is not a whole number or RANK is not below WORLD_SIZE.
        """
        source = os.environ if env is None else env
        round_ = _int(source, ENV_ROUND)
        if round_ is None:
            round_ = _int(source, "TORCHELASTIC_RESTART_COUNT")
        restore = source.get(ENV_RESTORE_STEP)
        rolled_back_from = _int(source, ENV_ROLLED_BACK_FROM)
        settings = cls(
            rank=Rank(_int(source, "RANK") or 0),
            world_size=_int(source, "WORLD_SIZE") or 1,
            local_rank=_int(source, "LOCAL_RANK") or 0,
            local_world_size=_int(source, "LOCAL_WORLD_SIZE") or 1,
            master_address=source.get("MASTER_ADDR", ""),
            master_port=_int(source, "MASTER_PORT") or 0,
            round=None if round_ is None else RestartRound(round_),
            interval_steps=_int(source, ENV_INTERVAL_STEPS),
            timing=_timing(source),
            restore_step=Step(int(restore)) if restore else None,
            restore_known=restore is not None,
            rolled_back_from=None if rolled_back_from is None else Step(rolled_back_from),
            scratch_dir=source.get(ENV_SCRATCH_DIR) or None,
            agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            store_secret=source.get(ENV_STORE_SECRET) or None,
        )
        if not 0 <= settings.rank < settings.world_size:
            raise ConfigError(
                f"RANK={settings.rank} is not below WORLD_SIZE={settings.world_size}: start the "
                "ranks by `holdfast run` or torchrun, which set both"
            )
        return settings


_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def rank_environment(
    settings: RankSettings, *, group_rank: int, run_id: str, max_restarts: int = 0
) -> dict[str, str]:
    """Return the variables that the launcher adds to a rank's environment: torchrun's and Holdfast's.

    Args:
        settings: Settings of the rank.
        group_rank: Index of the rank's pod.
        run_id: Value of TORCHELASTIC_RUN_ID.
        max_restarts: Restart limit of a standalone run. In a pod the operator counts restarts, and the
            launcher has no limit. The variable is then the number of the restart.

    TORCHELASTIC_USE_AGENT_STORE makes `init_process_group` (env://) connect to the round's store, so that
    rank 0 does not host one. Every round has its own store process, so that keys of an older round are
    never visible.
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
        # Some distributions build torch without libuv, where a request for it is an error. torch reads
        # this variable in versions after 2.6; see gang.store for 2.6.
        "USE_LIBUV": "0",
        _NCCL_ERRORS: os.environ.get(_NCCL_ERRORS, "1"),
    }
    if settings.round is not None:
        env[ENV_ROUND] = str(settings.round)
    if settings.interval_steps is not None:
        env[ENV_INTERVAL_STEPS] = str(settings.interval_steps)
    if settings.timing is not None:
        seconds = settings.timing.seconds
        env[ENV_INTERVAL_SECONDS] = _AUTO if seconds is None else str(seconds)
        env[ENV_MTBF_SECONDS] = str(settings.timing.mtbf_seconds)
    if settings.restore_known:
        env[ENV_RESTORE_STEP] = "" if settings.restore_step is None else str(settings.restore_step)
    if settings.rolled_back_from is not None:
        env[ENV_ROLLED_BACK_FROM] = str(settings.rolled_back_from)
    if settings.store_secret is not None:
        env[ENV_STORE_SECRET] = settings.store_secret
    if settings.scratch_dir is not None:
        env[ENV_SCRATCH_DIR] = settings.scratch_dir
    return env


def current_environment() -> dict[str, str]:
    """Return a copy of this process's environment for a child."""
    return dict(os.environ)


def apply_environment(env: Mapping[str, str]) -> None:
    """Set variables in this process. A forked rank calls this before the user's code runs."""
    os.environ.update(env)


def single_thread_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with one thread for each maths library whose variable is not set in it."""
    return {**SINGLE_THREAD, **env}


def _timing(source: Mapping[str, str]) -> Timing | None:
    seconds = source.get(ENV_INTERVAL_SECONDS)
    if not seconds:
        return None
    mtbf_seconds = _seconds(source, ENV_MTBF_SECONDS) if source.get(ENV_MTBF_SECONDS) else None
    return Timing(
        None if seconds == _AUTO else _seconds(source, ENV_INTERVAL_SECONDS),
        DEFAULT_MTBF_SECONDS if mtbf_seconds is None else mtbf_seconds,
    )


def _seconds(source: Mapping[str, str], name: str) -> float:
    raw = source[name]
    try:
        seconds = float(raw)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name}={raw!r}: expected a number of seconds above 0")
    return seconds


def _int(source: Mapping[str, str], name: str) -> int | None:
    raw = source.get(name)
    if raw is None or raw == "":
        return None
    try:
        return int(raw)
    except ValueError as error:
        raise ConfigError(f"{name}={raw!r}: expected a whole number") from error
