"""Values of the gauges while a round ends, and names that a script reports."""

from __future__ import annotations

from holdfast_core.ids import Rank, RestartRound, Step, TierName
from holdfast_sidecar.base.telemetry import Metrics, RankGauges


def sample(metrics: Metrics, name: str) -> float:
    lines = metrics.render().decode().splitlines()
    (line,) = [x for x in lines if x.partition(" ")[0] == name]
    return float(line.rpartition(" ")[2])


def test_a_seal_is_no_step_of_the_new_round() -> None:
    """The sidecar is sealed for round 5, and the ranks of round 4 still run: their steps are reported."""
    metrics = Metrics()
    metrics.trained(RestartRound(4))
    metrics.gang([RankGauges(Rank(0), Step(30))])
    assert sample(metrics, "holdfast_trained_round") == 4
    assert sample(metrics, 'holdfast_step{rank="0"}') == 30


def test_only_present_stragglers_have_a_metric() -> None:
    metrics = Metrics()
    metrics.stragglers({Rank(3): 2.5, Rank(4): 1.5})
    assert sample(metrics, 'holdfast_straggler_factor{rank="3"}') == 2.5
    metrics.stragglers({Rank(4): 1.6})
    assert sample(metrics, 'holdfast_straggler_factor{rank="4"}') == 1.6
    assert metrics.render().decode().count("holdfast_straggler_factor{") == 1


def test_names_that_a_script_reports_do_not_fill_the_page() -> None:
    metrics = Metrics()
    for step in range(100):
        metrics.gang([RankGauges(Rank(0), Step(step), {f"n{step}": 1.0, "loss": 0.5})])
    page = metrics.render().decode()
    assert page.count("holdfast_reported{") == 2
    assert 'holdfast_reported{name="loss",rank="0"} 0.5' in page


def test_the_process_itself_is_watched() -> None:
    assert sample(Metrics(), "process_resident_memory_bytes") > 0


def test_metrics_count_bytes_before_and_after_compression() -> None:
    metrics = Metrics()
    metrics.compressed(TierName.OBJECT, 1000, 700)
    metrics.compressed(TierName.OBJECT, 500, 500)
    assert sample(metrics, 'holdfast_compression_input_bytes_total{tier="object"}') == 1500
    assert sample(metrics, 'holdfast_compression_output_bytes_total{tier="object"}') == 1200


def test_the_time_of_one_pod_has_another_name_than_the_recovery_of_the_gang() -> None:
    """The operator counts the phases of whole recoveries in holdfast_recovery_seconds."""
    metrics = Metrics()
    metrics.rehydrated(2.5)
    assert sample(metrics, "holdfast_rehydrate_seconds_sum") == 2.5
    assert "holdfast_recovery_seconds" not in metrics.render().decode()
