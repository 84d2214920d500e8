"""Names of a job's objects: another uid gives other names, and a pod's name can be parsed."""

from __future__ import annotations

import pytest

from holdfast_core.ids import (
    FIRST_SPARE,
    MAX_SPARES,
    CheckpointId,
    JobUid,
    RestartRound,
    Step,
)
from holdfast_core.names import (
    certificates_secret_name,
    checkpoint_name,
    parse_pod_name,
    pod_name,
    service_name,
)

FIRST = JobUid("11111111-2222-3333-4444-555555555555")
SECOND = JobUid("11111111-2222-3333-4444-555555555556")
COMMIT = CheckpointId(Step(100), RestartRound(0))


def names(uid: JobUid) -> set[str]:
    return {
        pod_name("gpt", uid, 0, 0),
        service_name("gpt", uid),
        certificates_secret_name("gpt", uid, 63, 0),
        checkpoint_name("gpt", uid, COMMIT),
    }


@pytest.mark.fault("Two jobs have the same name, one after the other")
def test_two_jobs_of_one_name_share_no_name() -> None:
    assert not names(FIRST) & names(SECOND)
    assert names(FIRST) == names(FIRST)


def test_a_pod_name_is_read_back() -> None:
    name = pod_name("gpt-0-r1", FIRST, 4095, 12)
    assert parse_pod_name("gpt-0-r1", FIRST, name) == (4095, 12)


def test_the_name_of_a_spare_has_its_number() -> None:
    name = pod_name("gpt", FIRST, FIRST_SPARE + 3, 12)
    assert name == pod_name("gpt", FIRST, 3, 12).replace("-3-r", "-s3-r")
    assert parse_pod_name("gpt", FIRST, name) == (FIRST_SPARE + 3, 12)


@pytest.mark.parametrize(
    "name",
    [
        pod_name("gpt", SECOND, 0, 0),
        pod_name("gpt", FIRST, 0, 0) + "-x",
        pod_name("gpt", FIRST, 0, 0) + "\n",
        pod_name("gpt", FIRST, 0, 0).replace("-0-r0", "-00-r0"),
        pod_name("gpt", FIRST, 0, 0).replace("-0-r0", "--1-r0"),
        pod_name("gpt", FIRST, 0, 0).replace("-r0", "-r٣"),
        pod_name("gpt", FIRST, 0, 10**9),
        pod_name("gpt", FIRST, 0, 0).replace("-0-r0", f"-{FIRST_SPARE}-r0"),
        pod_name("gpt", FIRST, FIRST_SPARE + MAX_SPARES, 0),
        "gpt-0-r0",
        "",
    ],
)
def test_other_names_are_no_pods_of_the_job(name: str) -> None:
    assert parse_pod_name("gpt", FIRST, name) is None


def test_the_longest_name_fits_a_host_name() -> None:
    for last in (FIRST_SPARE - 1, FIRST_SPARE + MAX_SPARES - 1):
        assert len(pod_name("j" * 40, FIRST, last, 10**8)) <= 63
