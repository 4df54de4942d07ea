"""What happened over time, thinned for drawing."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fulltilt.records import BUCKETS, Buckets, HostReading, Sample, Span
from fulltilt.report import series
from tests.report import examples


def test_the_ledger_over_time_closes_in_every_slice():
    run, _ = examples.starved()
    wall_s = run.spans[0][-1].t1_s
    shares = series.ledger_over_time(run.spans[0], wall_s)
    assert set(shares) < set(BUCKETS)
    for slices in zip(*shares.values(), strict=True):
        assert sum(slices) == pytest.approx(1.0, abs=1e-6)


def test_a_summary_span_is_spread_over_its_slices():
    span = Span(0.0, 10.0, 0, 1000, 1000, None, Buckets(data_wait_s=4.0, compute_s=6.0))
    shares = series.ledger_over_time((span,), 10.0, bins=5)
    assert shares["data_wait_s"] == pytest.approx((0.4,) * 5)
    assert shares["compute_s"] == pytest.approx((0.6,) * 5)


def test_throughput_leaves_out_time_without_steps():
    run, _ = examples.starved()
    points = series.throughput(run.spans[0], run.spans[0][-1].t1_s)
    assert [p.new_line for p in points].count(True) == 3  # three epochs, with validation between them
    assert all(50 < p.value < 200 for p in points)


def test_a_rate_is_that_of_several_steps():
    """Two workers gave 97 samples a second, two batches at a time; the chart went up to 10,000."""
    ends = [0.0]
    for _ in range(40):
        ends += [ends[-1] + 0.159, ends[-1] + 0.16]
    spans = [Span(t0_s, t1_s, 0, 1, 1, 8, Buckets()) for t0_s, t1_s in pairwise(ends)]
    points = series.throughput(spans, ends[-1])
    assert len(points) >= 8
    assert all(point.high < 150 for point in points)


def test_a_reading_that_was_not_taken_is_a_gap():
    samples = [Sample(float(t), HostReading(cpu_pct=None if t == 3 else 10.0 * t)) for t in range(1, 7)]
    points = series.readings(series.slots(samples, 6.0), lambda sample: sample.host.cpu_pct)
    assert [(p.t_s, p.value, p.new_line) for p in points] == [
        (0.5, 10.0, True),
        (1.5, 20.0, False),
        (3.5, 40.0, True),
        (4.5, 50.0, False),
        (5.5, 60.0, False),
    ]


def test_many_readings_keep_their_extremes():
    samples = [Sample(float(t), HostReading(cpu_pct=90.0 if t == 777 else 10.0)) for t in range(1, 5001)]
    points = series.readings(series.slots(samples, 5000.0), lambda sample: sample.host.cpu_pct)
    assert len(points) <= series.POINTS + 1
    assert max(point.high for point in points) == 90.0
    assert [point.new_line for point in points].count(True) == 1


def test_a_lost_gpu_ends_its_line():
    run, _ = examples.straggler()
    uuid = run.samples[0].gpus[2].uuid
    lost = [replace(s, gpus=s.gpus[:2]) if s.t_s > 30 else s for s in run.samples]
    points = series.readings(series.of_gpu(series.slots(lost, 67.0), uuid), lambda gpu: gpu.util_pct)
    assert 29 < points[-1].t_s < 31


def test_epochs_begin_where_the_number_changes():
    run, _ = examples.starved()
    starts = series.epoch_starts(run.spans[0])
    assert len(starts) == 2
    assert all(any(span.t0_s == t_s for span in run.spans[0]) for t_s in starts)
