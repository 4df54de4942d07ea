"""What the terminal and the page both show of a run."""

import dataclasses
from dataclasses import replace

import pytest

from fulltilt.records import Buckets, HotLine, Ledger, Throughput
from fulltilt.report import run_view
from fulltilt.report.run_view import compare, distinct_names, step_picture, used_loaders
from tests.report import examples

# --------------------------------------------------------------------------- one step


def lengths(lane):
    return {part.phase: part.length_s for part in lane.parts}


def test_a_starved_gpu_waits_while_its_workers_preprocess():
    picture = step_picture(*examples.starved())
    workers, host, gpu = picture.lanes
    assert [lane.name for lane in picture.lanes] == ["Each of 2 workers", "Host", "GPU"]
    # 0.94 s a batch in two workers: each has half of it to do in the time of one step.
    assert lengths(workers) == pytest.approx(
        {"load": 0.045, "preprocess": 0.415, "queue": 0.01, "idle": 0.0227}, abs=1e-4
    )
    assert list(lengths(host)) == ["data_wait", "transfer", "forward", "backward", "optimizer", "other"]
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
    assert step_picture(cut, diagnosis).steps == sum(span.steps for span in whole) - 1  # the first is part warm-up


# --------------------------------------------------------------------------- loaders of one line


def made_anew_each_epoch():
    """The starved run as a script would leave it that makes its loader inside the epoch loop."""
    run, diagnosis = examples.starved()
    rank = run.ranks[0]
    loader, work = rank.loaders[0], rank.workers[0]
    thirds = {"fetch_s": work.fetch_s / 3, "fetch_cpu_s": work.fetch_cpu_s / 3, "cpu_wait_s": work.cpu_wait_s / 3}
    loaders = tuple(
        replace(loader, loader_id=i, passes=1, batches=150, samples=9600, wait_s=loader.wait_s / 3) for i in range(3)
    )
    workers = tuple(replace(work, loader_id=i, processes=2, batches=150, **thirds) for i in range(3))
    return replace(run, ranks=(replace(rank, loaders=loaders, workers=workers),)), diagnosis


def test_training_and_evaluation_stay_apart_and_unused_ones_are_left_out():
    run, _ = examples.starved()
    train = run.ranks[0].loaders[0]
    others = (replace(train, loader_id=1, role="eval"), replace(train, loader_id=2, where="x.py:1", batches=0))
    sites = used_loaders(replace(run.ranks[0], loaders=(train, *others)))
    assert [loader.role for loader, _ in sites] == ["train", "eval"]


def test_workers_that_fed_only_some_steps_are_not_drawn():
    picture = step_picture(*made_anew_each_epoch())
    assert [lane.name for lane in picture.lanes] == ["Host", "GPU"]


def test_batches_that_workers_did_not_report_do_not_shrink_the_picture():
    run, diagnosis = examples.starved()
    work = replace(run.ranks[0].workers[0], batches=225, fetch_s=0.94 * 225, fetch_cpu_s=0.83 * 225, cpu_wait_s=4.5)
    picture = step_picture(replace(run, ranks=(replace(run.ranks[0], workers=(work,)),)), diagnosis)
    assert picture is not None
    assert picture.lanes[0].parts[1].length_s == pytest.approx(0.415)


def test_a_line_seen_twice_is_one_line():
    lines = [HotLine("a.py:1", "f", 1.0, "x()"), HotLine("a.py:2", "f", 2.5), HotLine("a.py:1", "f", 2.0, "x()")]
    assert run_view.joined_lines(lines) == (HotLine("a.py:1", "f", 3.0, "x()"), HotLine("a.py:2", "f", 2.5))


# --------------------------------------------------------------------------- several runs


def test_the_table_has_settings_use_memory_and_speed():
    rows = {row.name: row for row in compare([examples.starved(), examples.healthy()])}
    assert rows["num_workers"].cells == ("2", "7")
    assert rows["GPU use"].cells == ("34 %", "97 %")
    assert rows["GPU memory, peak"].cells == ("7.9 GiB", "7.9 GiB")
    assert rows["samples/s"].cells == ("132", "403")
    assert rows["relative speed, after start-up"].cells == ("1.00 ×", "3.05 ×")
    assert rows["num_workers"].differs
    assert not rows["batch_size"].differs


def test_what_takes_long_in_one_of_the_runs_has_a_row():
    """Two runs before and after a slow line was mended showed nothing of it."""
    run, diagnosis = examples.cpu_only()
    wall_s = diagnosis.ledger.wall_s
    slow = dataclasses.replace(diagnosis, ledger=Ledger(wall_s, Buckets(host_code_s=wall_s)))
    rows = {row.name: row for row in compare([(run, slow), (run, diagnosis)])}
    assert rows["host code, after start-up"].cells[0] == "100 %"
    assert "host code" not in {row.name for row in compare([examples.healthy(), examples.healthy()])}


def test_runs_that_do_not_know_their_samples_are_compared_by_their_steps():
    run, diagnosis = examples.healthy()
    slow, fast = (dataclasses.replace(diagnosis, throughput=Throughput(None, rate, 9, None)) for rate in (2.0, 5.0))
    rows = {row.name: row for row in compare([(run, slow), (run, fast)])}
    assert rows["relative speed, after start-up"].cells == ("1.00 ×", "2.50 ×")


def test_what_no_run_has_is_left_out():
    names = [row.name for row in compare([examples.starved(), examples.healthy()])]
    assert "residency" not in names
    names = [row.name for row in compare([examples.cpu_only(), examples.cpu_only()])]
    assert "GPU use" not in names


def test_a_run_without_steps_can_be_compared():
    rows = {row.name: row for row in compare([examples.crashed(), examples.starved()])}
    assert rows["samples/s"].cells == ("–", "132")
    assert "relative speed, after start-up" not in rows


def test_runs_of_one_script_are_told_apart_by_their_folders():
    run, diagnosis = examples.starved()
    before, after, elsewhere = (
        (dataclasses.replace(run, folder=folder), diagnosis) for folder in ("a/before", "a/after", "b/after")
    )
    assert distinct_names([before, examples.healthy()]) == (run.run.name, examples.healthy()[0].run.name)
    assert distinct_names([before, after]) == ("before", "after")
    assert distinct_names([after, elsewhere]) == ("a/after", "b/after")


def test_lines_of_the_recorder_are_not_shown_as_the_users():
    rank = examples.starved()[0].ranks[0]
    ours = replace(rank.host_lines[0], where="fulltilt/recorder/hooks/training.py:250", seconds=1e6)
    shown = dict(run_view.hot_lines(replace(rank, host_lines=(ours, *rank.host_lines)), 5))
    assert [line for _, line in shown["In the training process"]] == list(rank.host_lines[:5])
