"""The JSON answer: its keys are a contract."""

import json
import math
from dataclasses import replace

import pytest

from fulltilt.records import BUCKETS, Throughput
from fulltilt.report.answer import to_plain
from tests.report import examples

KEYS = {
    "schema_version": None,
    "verdict": {"code", "share", "sentence", "share_after_startup"},
    "ledger": {"wall_s", "buckets"},
    "throughput": {"samples_per_s", "steps_per_s", "steps", "samples"},
    "ceilings": {"compute_samples_per_s", "loader_samples_per_s"},
    "gpu": {
        *("uuid", "name", "index", "util_pct", "sm_active_pct", "sm_occupancy_pct", "tensor_active_pct"),
        *("dram_active_pct", "vram_used_bytes", "vram_peak_bytes", "vram_total_bytes", "power_w", "energy_j"),
        *("temperature_peak_c", "throttled_share", "throttle_reasons", "foreign_processes"),
    },
    "findings": {
        "code",
        "share",
        "severity",
        "evidence",
        "where",
        "fix",
        "predicted_speedup",
        "share_after_startup",
        "title",
    },
    "settings": None,
    "checklist": {"name", "state", "figure", "remedy"},
    "abstained": {"code", "lacks"},
    "ranks": {
        "rank",
        "buckets",
        "steps",
        "own_work_s",
        "waits_s",
        "slowest",
        "hostname",
        "finished",
        "relative_speed",
        "own_past_speed",
        "last_share",
    },
    "step": {
        *("load_s", "transfer_s", "forward_s", "backward_s", "optimizer_s", "other_s", "gpu_busy_s", "gpu_idle_s"),
    },
    "gpu_step": {"kernel_s", "gap_s", "idle_s"},
    "utilisation": {"au", "mfu", "flops_per_step", "peak_flops_per_s", "peak_precision"},
    "invalid_because": None,
    "job": None,
    "run": {"folder", "name", "command", "started_at", "state", "exit_code", "ranks", "warnings"},
}
CONTRACT_BUCKETS = {
    *("startup_s", "data_wait_s", "transfer_s", "compute_s", "sync_s", "host_code_s", "validation_s"),
    *("checkpoint_s", "epoch_turnover_s", "communication_s", "unattributed_s"),
}


def test_the_keys_of_the_contract_are_frozen():
    run, diagnosis = examples.starved()
    answer = to_plain(diagnosis, run)
    assert set(answer) == set(KEYS)
    for key, inner in KEYS.items():
        value = answer[key]
        for item in value if isinstance(value, list) else [value]:
            if inner is not None:
                assert set(item) == inner, key
    assert set(answer["ledger"]["buckets"]) == CONTRACT_BUCKETS == set(BUCKETS)
    assert answer["schema_version"] == 1


@pytest.mark.parametrize("name", ["starved", "healthy", "cpu_only", "crashed", "straggler", "running", "hostile"])
def test_every_answer_is_json_with_all_its_keys(name):
    run, diagnosis = getattr(examples, name)()
    text = json.dumps(to_plain(diagnosis, run), allow_nan=False)
    assert set(json.loads(text)) == set(KEYS)


def test_what_was_not_measured_is_null_and_a_measured_zero_is_zero():
    run, diagnosis = examples.crashed()
    answer = to_plain(diagnosis, run)
    assert answer["throughput"]["samples_per_s"] is None
    assert answer["ceilings"] == {"compute_samples_per_s": None, "loader_samples_per_s": None}
    assert answer["ledger"]["buckets"]["compute_s"] == 0.0
    assert answer["step"] is None
    assert (answer["gpu"], answer["findings"]) == ([], [])


def test_a_figure_that_is_not_finite_is_null():
    _, diagnosis = examples.starved()
    answer = to_plain(replace(diagnosis, throughput=Throughput(math.nan, math.inf, 3)))
    assert answer["throughput"] == {"samples_per_s": None, "steps_per_s": None, "steps": 3, "samples": None}
    assert answer["run"] is None


def test_settings_are_an_object_and_speedups_are_pairs():
    run, diagnosis = examples.starved()
    answer = to_plain(diagnosis, run)
    assert answer["settings"]["num_workers"] == 2
    assert answer["settings"]["residency"] is None
    assert answer["findings"][0]["predicted_speedup"] == [2.6, 3.1]
    assert answer["findings"][0]["where"] == "dataset.py:48"


def test_the_state_tells_a_running_job():
    run, diagnosis = examples.running()
    assert to_plain(diagnosis, run)["run"]["state"] == "running"
