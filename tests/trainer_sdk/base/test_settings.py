"""A rank reads the same settings that the launcher has written into its environment."""

from __future__ import annotations

import inspect
import re

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent

from holdfast.base.settings import RankSettings, rank_environment
from holdfast_core.errors import ConfigError
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.messages.schema import Timing

FULL = RankSettings(
    rank=Rank(3),
    world_size=8,
    local_rank=1,
    local_world_size=2,
    master_address="10.0.0.7",
    master_port=4711,
    round=RestartRound(5),
    interval_steps=50,
    restore_step=Step(100),
    restore_known=True,
    rolled_back_from=Step(140),
    scratch_dir="/dev/shm/x",
    agent_store=True,
    store_secret="secret",
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(FULL, id="all"),
        pytest.param(
            RankSettings(round=RestartRound(0), restore_known=True, agent_store=True),
            id="nothing-to-restore",
        ),
        pytest.param(
            RankSettings(
                round=RestartRound(0),
                interval_steps=0,
                timing=Timing(300.0, 60.5),
                agent_store=True,
            ),
            id="seconds",
        ),
        pytest.param(
            RankSettings(
                round=RestartRound(0),
                interval_steps=0,
                timing=Timing(None, 7200.0),
                agent_store=True,
            ),
            id="auto",
        ),
        pytest.param(
            RankSettings(round=RestartRound(0), interval_steps=0, agent_store=True), id="no-time"
        ),
    ],
)
def test_settings_survive_a_round_trip_through_the_environment(settings: RankSettings) -> None:
    env = rank_environment(settings, group_rank=1, run_id="job")
    assert RankSettings.from_env(env) == settings


@pytest.mark.parametrize("wrong", ["often", "0", "-1", "nan", "inf"])
def test_an_interval_that_is_no_time_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"HOLDFAST_INTERVAL_SECONDS='.*': expected a number"):
        RankSettings.from_env({"HOLDFAST_INTERVAL_SECONDS": wrong})


def test_torchrun_names_are_kept() -> None:
    env = rank_environment(FULL, group_rank=1, run_id="job", max_restarts=9)
    assert env["GROUP_WORLD_SIZE"] == "4"
    assert env["ROLE_NAME"] == "default"
    assert env["ROLE_RANK"] == "3"
    assert env["ROLE_WORLD_SIZE"] == "8"
    assert env["TORCHELASTIC_MAX_RESTARTS"] == "9"
    assert env["RANK"] == "3"
    assert env["WORLD_SIZE"] == "8"
    assert env["LOCAL_RANK"] == "1"
    assert env["LOCAL_WORLD_SIZE"] == "2"
    assert env["GROUP_RANK"] == "1"
    assert env["MASTER_ADDR"] == "10.0.0.7"
    assert env["MASTER_PORT"] == "4711"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "5"
    assert env["TORCHELASTIC_RUN_ID"] == "job"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.fault("A variable that torchrun sets is missing")
def test_every_variable_that_torchrun_sets_is_set() -> None:
    """The names come from the source of torch's agent, because a new release of torch may add a variable."""
    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    names = set(re.findall(r'^ {16}"([A-Z_]+)":', source, re.MULTILINE))
    assert "RANK" in names
    assert names <= rank_environment(FULL, group_rank=1, run_id="job").keys()


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"RANK": "one"}, id="no-number"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "2"}, id="outside-of-the-world"),
    ],
)
def test_an_invalid_environment_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        RankSettings.from_env(env)


def test_outside_of_a_launcher_there_is_one_rank() -> None:
    assert RankSettings.from_env({}) == RankSettings()
