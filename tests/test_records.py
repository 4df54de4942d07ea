"""Records: frozen, standard library only, and the same after a trip through JSON."""

import ast
import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from fulltilt import records
from fulltilt.records import BUCKETS, Buckets
from fulltilt.store import decode, encode
from tests.anything import any_of

RECORDS = [kind for _, kind in inspect.getmembers(records, inspect.isclass) if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_is_the_same_after_a_trip_through_json(kind: type) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(any_of(kind))
    def round_trip(record: Any) -> None:
        line = json.dumps(encode(record), allow_nan=False)
        again = decode(kind, json.loads(line))
        assert again == record
        assert json.dumps(encode(again)) == line  # 1, 1.0 and True are equal; as JSON they are not

    round_trip()


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_of(records.Machine))
def test_a_full_encoding_has_every_field_and_decodes_to_the_same(machine: records.Machine) -> None:
    plain = encode(machine, fully=True)
    assert list(plain) == [f.name for f in dataclasses.fields(machine)]
    assert list(plain["cpu"]) == ["present", "affinity", "quota", "usable", "allotted"]
    assert decode(records.Machine, json.loads(json.dumps(plain))) == machine


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_is_frozen_and_has_slots(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen
    assert "__slots__" in vars(kind)


def test_records_import_the_standard_library_only() -> None:
    files = [*Path(inspect.getfile(records)).parent.glob("*.py")]
    imported = {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name and not name.startswith("fulltilt.records")
    }
    assert {name.split(".")[0] for name in imported} <= set(sys.stdlib_module_names)


def test_a_figure_that_is_not_finite_counts_as_not_measured() -> None:
    reading = records.HostReading(cpu_pct=float("nan"), iowait_pct=float("inf"), load_1min=0.0)
    again = decode(records.HostReading, json.loads(json.dumps(encode(reading), allow_nan=False)))
    assert (again.cpu_pct, again.iowait_pct, again.load_1min) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("kind", "plain", "complaint"),
    [
        (records.Span, [], "Span should be an object"),
        (records.Span, {}, "Span.t0_s is missing"),
        (records.CpuCapacity, {"present": 2.5, "affinity": 2, "quota": None, "usable": 2}, "present should be int"),
        (records.CpuCapacity, {"present": True, "affinity": 2, "quota": None, "usable": 2}, "present should be int"),
        (records.CpuCapacity, {"present": 2, "affinity": 2, "quota": None, "usable": 10**400}, "usable is not finite"),
        (records.CheckLine, {"name": "x", "state": "perhaps", "figure": ""}, "unknown value 'perhaps'"),
        (records.CheckLine, {"name": None, "state": "ok", "figure": ""}, "name should be str"),
        (records.Sample, {"t_s": 0, "host": {}, "gpus": [1]}, r"gpus\[0\] should be an object"),
        (records.HostReading, {"cpu_per_core_pct": "12"}, "should be a list"),
        (records.Finding, {"code": "throttled", "share": None}, "share should be float"),
    ],
)
def test_what_is_not_a_record_is_refused_by_its_path(kind: type, plain: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(kind, plain)


def test_keys_of_a_later_minor_version_are_ignored() -> None:
    assert decode(records.HostReading, {"cpu_pct": 3, "colour": "red"}) == records.HostReading(cpu_pct=3.0)


def test_buckets_add_up() -> None:
    one = Buckets(**{name: float(i) for i, name in enumerate(BUCKETS)})
    assert one.total_s == sum(range(len(BUCKETS)))
    assert one.plus(one).total_s == 2 * one.total_s
    assert one.plus(Buckets()) == one
