"""Several runs side by side."""

import dataclasses

from fulltilt.records import Buckets, Ledger, Throughput
from fulltilt.report.run_view import compare, told_apart
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
    assert rows["speed against the first"].cells == ("1.00 ×", "2.50 ×")


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
