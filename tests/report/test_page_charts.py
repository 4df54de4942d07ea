"""Charts: round axes, and what happened over time, thinned for drawing."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fulltilt.records import BUCKETS, Buckets, HostReading, Sample, Span
from fulltilt.report import page_charts
from tests.report import examples


def test_the_ledger_over_time_closes_in_every_slice():
    run, _ = examples.starved()
    wall_s = run.spans[0][-1].t1_s
    shares = page_charts.ledger_over_time(run.spans[0], wall_s)
    assert set(shares) < set(BUCKETS)
    for slices in zip(*shares.values(), strict=True):
        assert sum(slices) == pytest.approx(1.0, abs=1e-6)


def test_a_summary_span_is_spread_over_its_slices():
    span = Span(0.0, 10.0, 0, 1000, 1000, None, Buckets(data_wait_s=4.0, compute_s=6.0))
    shares = page_charts.ledger_over_time((span,), 10.0, bins=5)
    assert shares["data_wait_s"] == pytest.approx((0.4,) * 5)
    assert shares["compute_s"] == pytest.approx((0.6,) * 5)


def test_throughput_leaves_out_time_without_steps():
    run, _ = examples.starved()
    points = page_charts.throughput(run.spans[0], run.spans[0][-1].t1_s)
    assert [p.new_line for p in points].count(True) == 3  # three epochs, with validation between them
    assert all(50 < p.value < 200 for p in points)


def test_a_rate_is_that_of_several_steps():
    """Two workers gave 97 samples a second, two batches at a time; the chart went up to 10,000."""
    ends = [0.0]
    for _ in range(40):
        ends += [ends[-1] + 0.159, ends[-1] + 0.16]
    spans = [Span(t0_s, t1_s, 0, 1, 1, 8, Buckets()) for t0_s, t1_s in pairwise(ends)]
    points = page_charts.throughput(spans, ends[-1])
    assert len(points) >= 8
    assert all(point.value < 150 for point in points)


def test_a_reading_that_was_not_taken_is_a_gap():
    points = page_charts.thinned(((t - 1.0, float(t), 10.0 * t, 1.0) for t in (1, 2, 4, 5, 6)), 6.0)
    assert [(p.t_s, p.value, p.new_line) for p in points] == [
        (0.5, 10.0, True),
        (1.5, 20.0, False),
        (3.5, 40.0, True),
        (4.5, 50.0, False),
        (5.5, 60.0, False),
    ]


def test_many_readings_are_few_points_without_gaps():
    samples = [Sample(float(t), HostReading()) for t in range(1, 5001)]
    points = page_charts.thinned(((t0_s, t1_s, t1_s, 1.0) for t0_s, t1_s, _ in page_charts.timed(samples)), 5000.0)
    assert len(points) <= page_charts.POINTS
    assert points[-1].value == pytest.approx(5000, abs=20)
    assert [point.new_line for point in points].count(True) == 1


def test_a_lost_gpu_ends_its_line():
    run, diagnosis = examples.straggler()
    seen = "".join(page_charts.machine_charts(run, diagnosis))
    lost = tuple(replace(s, gpus=s.gpus[:2]) if s.t_s > 30 else s for s in run.samples)
    cut = "".join(page_charts.machine_charts(replace(run, samples=lost), diagnosis))
    assert "GPU 2 use" in cut
    assert len(cut) < len(seen)


def test_of_several_machines_the_first_is_drawn():
    samples = [Sample(t, HostReading()) for t in (1.0, 2.0, 3.0, 1.0, 2.0)]
    assert [t1_s for _, t1_s, _ in page_charts.timed(samples)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("highest", "top"), [(0, 1), (0.07, 0.08), (0.1, 0.1), (97, 100), (101, 200), (132, 200), (412, 500), (9.1e6, 1e7)]
)
def test_axes_end_on_round_figures(highest, top):
    assert page_charts.nice_top(highest) == pytest.approx(top)
