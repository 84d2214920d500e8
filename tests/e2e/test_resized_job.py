"""The number of workers of a job changes by its spec while it trains."""

from __future__ import annotations

from testbed.driver.same_bits import SameBits


def _resize(scenario, job, workers: int) -> None:
    """Set the number of workers and wait until a gang of this size has trained."""
    before = job.round
    scenario.kube.patch(job.KIND, job.namespace, job.name, {"spec": {"workers": workers}})

    def trains() -> bool:
        status = job.status
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        over = conditions.get("Resizing", {}).get("reason") == "Resized"
        running = conditions["Running"]["status"] == "True"
        new = status["restartRound"] > before and len(status["members"]) == workers
        return new and running and over and conditions["Resizing"]["status"] == "False"

    job.wait(f"training with {workers} workers", trains)
    record = job.status["recoveries"][-1]
    assert (record["reason"], record["lostSteps"]) == ("Resized", 0), record
    assert job.round == before + 1


def test_two_workers_become_three_and_two_again(scenario):
    training = SameBits(workers=2, steps=300, sleep_per_step=0.3)
    job = scenario.start(training, interval=50, object_every=100)
    job.wait_step(20)
    _resize(scenario, job, 3)
    grown = job.status["restorePoint"]
    assert job.status["recoveries"][-1]["sources"]["object"] >= 1
    job.wait_step(grown["step"] + 20)
    _resize(scenario, job, 2)
    shrunk = job.status["restorePoint"]
    assert shrunk["step"] >= grown["step"] + 20
    assert job.status["recoveries"][-1]["sources"]["object"] >= 1
    assert job.status["restarts"] == 0
    scenario.finish_and_judge(job, training)
