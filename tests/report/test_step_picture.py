"""One step, laid out for drawing."""

from dataclasses import replace

import pytest

from fulltilt.report.run_view import step_picture
from tests.report import examples


def lengths(lane):
    return {part.kind: part.length_s for part in lane.parts}


def test_a_starved_gpu_waits_while_its_workers_preprocess():
    picture = step_picture(*examples.starved())
    workers, host, gpu = picture.lanes
    assert [lane.name for lane in picture.lanes] == ["Each of 2 workers", "Host", "GPU"]
    # 0.94 s a batch in two workers: each has half of it to do in the time of one step.
    assert lengths(workers) == pytest.approx(
        {"load": 0.045, "preprocess": 0.415, "queue": 0.01, "idle": 0.0227}, abs=1e-4
    )
    assert list(lengths(host)) == ["wait", "transfer", "forward", "backward", "optimizer", "other"]
    assert lengths(gpu)["idle"] == pytest.approx(0.3377, abs=1e-3)
    assert picture.scale_s == pytest.approx(picture.step_s)


@pytest.mark.parametrize("name", ["starved", "healthy", "cpu_only", "straggler"])
def test_parts_follow_each_other_within_the_scale(name):
    picture = step_picture(*getattr(examples, name)())
    for lane in picture.lanes:
        end_s = 0.0
        for part in lane.parts:
            assert part.start_s == pytest.approx(end_s)
            assert part.length_s > 0
            end_s = part.start_s + part.length_s
        assert end_s <= picture.scale_s + 1e-9


def test_without_workers_the_host_loads_and_preprocesses():
    picture = step_picture(*examples.cpu_only())
    (host,) = picture.lanes
    shares = lengths(host)
    assert shares["preprocess"] / (shares["load"] + shares["preprocess"]) == pytest.approx(2.3 / 8.2)


def test_workers_that_need_longer_than_a_step_stretch_the_scale():
    run, diagnosis = examples.starved()
    slow = replace(run.ranks[0].workers[0], fetch_s=4000.0)
    picture = step_picture(replace(run, ranks=(replace(run.ranks[0], workers=(slow,)),)), diagnosis)
    assert picture.scale_s > picture.step_s
    assert "idle" not in lengths(picture.lanes[0])


def test_no_steps_no_picture():
    assert step_picture(*examples.crashed()) is None


def test_only_steps_whose_phases_were_written_make_the_mean():
    run, diagnosis = examples.starved()
    *whole, last = run.spans[0]
    cut = replace(run, spans=((*whole, replace(last, steps=7, phases=None)), *run.spans[1:]))
    assert step_picture(cut, diagnosis).steps == sum(span.steps for span in whole)
