"""Several runs side by side."""

import dataclasses

from fulltilt.report.comparison import compare, told_apart
from tests.report import examples


def test_the_table_has_settings_use_memory_and_speed():
    rows = {row.name: row for row in compare([examples.starved(), examples.healthy()])}
    assert rows["num_workers"].cells == ("2", "7")
    assert rows["GPU use"].cells == ("34 %", "97 %")
    assert rows["GPU memory, peak"].cells == ("7.9 GiB", "7.9 GiB")
    assert rows["samples/s"].cells == ("132", "403")
    assert rows["speed against the first"].cells == ("1.00 ×", "3.05 ×")
    assert rows["num_workers"].differs
    assert not rows["batch_size"].differs


def test_what_no_run_has_is_left_out():
    names = [row.name for row in compare([examples.starved(), examples.healthy()])]
    assert "residency" not in names
    names = [row.name for row in compare([examples.cpu_only(), examples.cpu_only()])]
    assert "GPU use" not in names


def test_a_run_without_steps_can_be_compared():
    rows = {row.name: row for row in compare([examples.crashed(), examples.starved()])}
    assert rows["samples/s"].cells == ("–", "132")
    assert "speed against the first" not in rows


def test_runs_of_one_script_are_told_apart_by_their_folders():
    run, diagnosis = examples.starved()
    before, after, elsewhere = (
        (dataclasses.replace(run, folder=folder), diagnosis) for folder in ("a/before", "a/after", "b/after")
    )
    assert told_apart([before, examples.healthy()]) == (run.run.name, examples.healthy()[0].run.name)
    assert told_apart([before, after]) == ("before", "after")
    assert told_apart([after, elsewhere]) == ("a/after", "b/after")
