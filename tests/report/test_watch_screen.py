"""The watch screen fits every window and shows what was measured, and only that."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from fulltilt.records import GpuProcess, GpuReading, HostReading, JobProcess, Sample
from fulltilt.report.console import encodable
from fulltilt.report.watch_screen import (
    UPWARD,
    WatchView,
    chart_rows,
    watch_lines,
)
from tests.anything import any_physical
from tests.test_join_tasks import write_task

GIB = 1024**3

T4 = GpuReading(
    uuid="GPU-1",
    index=0,
    name="Tesla T4",
    util_pct=85.0,
    vram_used_bytes=9 * GIB,
    vram_total_bytes=15 * GIB,
    power_w=62.0,
    power_limit_w=70.0,
    temperature_c=71.0,
    temperature_limit_c=93.0,
    sm_clock_mhz=1590.0,
    throttle_reasons=(),
    processes=(GpuProcess(4242, "python", 8 * GIB, False),),
)
HOST = HostReading(
    cpu_pct=45.0,
    cpu_per_core_pct=(20.0, 70.0),
    iowait_pct=3.0,
    load_1min=1.2,
    mem_total_bytes=64 * GIB,
    mem_used_bytes=16 * GIB,
    disk_read_bytes_per_s=120e6,
)


def view(gpus: tuple[GpuReading, ...] = (T4,), host: HostReading = HOST, count: int = 30, **more: object) -> WatchView:
    samples = tuple(Sample(float(t), host, gpus) for t in range(count))
    return WatchView("box", "14:03:21", 1.0, samples, **more)  # type: ignore[arg-type]


def text(view_: WatchView, width: int = 80, height: int = 24) -> str:
    return "\n".join(line.plain for line in watch_lines(view_, width, height))


# --------------------------------------------------------------------------- charts


def test_a_chart_grows_from_the_bottom_and_the_newest_value_is_at_the_right() -> None:
    assert chart_rows([0.0, 50.0, 100.0], 4, 2, 100.0) == ["   █", " ▁██"]
    assert chart_rows([10.0, 100.0], 1, 1, 100.0) == ["█"]


def test_zero_is_drawn_and_not_measured_is_blank() -> None:
    assert chart_rows([0.0, None, 0.0], 3, 2, 100.0) == ["   ", "▁ ▁"]


def test_without_block_characters_a_chart_is_ascii() -> None:
    assert encodable(chart_rows([0.0, 30.0, 100.0], 3, 1, 100.0)[0], "ascii") == ".:#"


@given(
    values=st.lists(st.none() | st.floats(-1e6, 1e6), max_size=50),
    width=st.integers(0, 60),
    height=st.integers(1, 9),
    top=st.floats(0, 1e6),
)
def test_a_chart_is_always_as_large_as_asked(values: list[float | None], width: int, height: int, top: float) -> None:
    rows = chart_rows(values, width, height, top)
    assert len(rows) == height
    assert all(len(row) == width and set(row) <= set(UPWARD) for row in rows)
    assert all(len(encodable(row, "ascii")) == width for row in rows)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_a_higher_value_is_never_drawn_lower(values: list[float], height: int) -> None:
    rows = chart_rows(values, len(values), height, 100.0)
    drawn = [sum(UPWARD.index(row[column]) for row in rows) for column in range(len(values))]
    order = sorted(range(len(values)), key=lambda column: values[column])
    assert [drawn[column] for column in order] == sorted(drawn)


# --------------------------------------------------------------------------- the screen


def test_it_shows_the_gpu_the_host_and_the_job() -> None:
    job = JobProcess(4242, "python", 8, 812.0, 12 * GIB, "/home/me/fulltilt-runs/20260101-train")
    shown = text(view(jobs=(job,)))
    for part in (
        "fulltilt watch  box  14:03:21",
        "every 1 s, q quits",
        "GPU 0  Tesla T4",
        "71 of 93 °C  62 of 70 W  1590 MHz",
        "busy    85 %",
        "VRAM    60 %",
        "9.0/15 GiB",
        "CPU     45 %",
        "2 CPUs  load 1.2  I/O wait 3 %",
        "RAM     25 %",
        "16 of 64 GiB",
        "114.4 MiB/s, at most 114.4 MiB/s",
        "4242  python +8         20260101-train     0        8 GiB   812 %     12 GiB",
    ):
        assert part in shown
    assert "\nSM" not in shown  # there is no GPM on a T4


def test_sm_activity_has_a_chart_where_there_is_gpm() -> None:
    assert "SM      71 %" in text(view((dataclasses.replace(T4, sm_active_pct=71.0),)))


def test_charts_follow_the_samples() -> None:
    samples = tuple(Sample(float(t), HOST, (dataclasses.replace(T4, util_pct=float(t)),)) for t in range(101))
    lines = text(WatchView("box", "14:03:21", 1.0, samples), 115, 24).splitlines()
    busy = next(line for line in lines if line.startswith("busy"))
    assert busy.startswith("busy   100 %")
    drawn = busy[14:].strip()
    assert drawn == "".join(sorted(drawn, key=UPWARD.index))
    assert drawn.endswith("█")


def test_a_container_limit_is_what_ram_is_measured_against() -> None:
    assert "16 of 32 GiB (limit)" in text(view(host=dataclasses.replace(HOST, mem_limit_bytes=32 * GIB)))


def test_without_a_gpu_it_shows_the_host_and_says_so() -> None:
    shown = text(view((), why_no_gpu="no NVIDIA driver is installed"))
    assert "no GPU  no NVIDIA driver is installed" in shown
    assert "CPU     45 %" in shown
    assert "no process uses a GPU" in shown


def test_before_the_first_sample_it_shows_that_nothing_is_known() -> None:
    shown = text(view(count=0))
    assert "CPU        –" in shown
    assert "0 %" not in shown


def test_a_lost_gpu_keeps_its_past_and_shows_no_figures() -> None:
    lost = GpuReading("GPU-1", 0, "Tesla T4", lost=True)
    samples = (*view().samples, Sample(30.0, HOST, (lost,)))
    shown = text(WatchView("box", "14:03:21", 1.0, samples))
    assert "lost: the driver no longer sees it" in shown
    assert "busy       –" in shown
    assert "█" in shown


@pytest.mark.parametrize(("temperature", "style"), [(60.0, "green"), (90.0, "bold yellow"), (94.0, "bold red")])
def test_the_temperature_is_coloured_by_its_limit(temperature: float, style: str) -> None:
    lines = watch_lines(view((dataclasses.replace(T4, temperature_c=temperature),)), 80, 24)
    title = next(line for line in lines if "°C" in line.plain)
    assert style in {str(span.style) for span in title.spans}


def test_throttling_stands_beside_the_name() -> None:
    assert "throttled: hw thermal" in text(view((dataclasses.replace(T4, throttle_reasons=("hw_thermal",)),)))


def test_charts_grow_with_the_window() -> None:
    small, large = text(view(), 80, 24), text(view(), 200, 60)
    assert large.count("█") > 2 * small.count("█")


def test_with_a_gpu_the_host_stays_small() -> None:
    lines = [line[:5] for line in text(view(), 200, 60).splitlines()]
    assert lines.index("cores") - lines.index("CPU  ") == 3


def test_many_gpus_get_a_line_each_and_none_is_left_out() -> None:
    gpus = tuple(dataclasses.replace(T4, index=n, uuid=f"GPU-{n}") for n in range(8))
    shown = text(view(gpus), 80, 24)
    assert all(f"\nGPU {n}" in shown for n in range(8))
    assert "71 °C" in shown


def test_what_does_not_fit_is_announced() -> None:
    gpus = tuple(dataclasses.replace(T4, index=n) for n in range(40))
    assert text(view(gpus), 80, 24).endswith("… enlarge the window to see the rest")
    jobs = tuple(JobProcess(n, "python") for n in range(30))
    assert text(view(jobs=jobs), 80, 24).splitlines()[-1].endswith("more")


def test_a_terminal_without_block_characters_gets_none() -> None:
    shown = encodable(text(view()), "ascii")
    assert not set(shown) & (set(UPWARD) - {" "})


@example(samples=[], jobs=[JobProcess(1, "\n", 0, None, None, "\n")], width=28, height=10)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    samples=st.lists(any_physical(Sample), max_size=4),
    jobs=st.lists(any_physical(JobProcess), max_size=4),
    width=st.integers(1, 220),
    height=st.integers(1, 70),
)
def test_any_reading_fits_any_window(samples: list[Sample], jobs: list[JobProcess], width: int, height: int) -> None:
    lines = watch_lines(WatchView("box", "14:03:21", 1.0, samples, tuple(jobs), None, "s.jsonl"), width, height)
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width and "\n" not in line.plain for line in lines)


def test_a_task_is_shown_behind_the_name_of_its_job(tmp_path: Path) -> None:
    task = write_task(tmp_path / "train-417", 0, (0,), host="box")
    shown = text(view(jobs=(JobProcess(7, "python", run_folder=str(task)),)), width=120)
    assert "  train-417/0-box  " in shown


def test_hostile_process_names_are_escaped() -> None:
    name = "\x1b[2J\x07[red]\u202ex\n"
    jobs = (JobProcess(pid=7, name=name, run_folder=f"/runs/{name}"), JobProcess(pid=8, name="\x1b]0;owned\x07"))
    gpu = dataclasses.replace(T4, name=name, processes=(GpuProcess(7, name, 1, False),))
    shown = text(view(gpus=(gpu,), jobs=jobs, recording=name, why_no_gpu=name), width=120)
    assert "[red]" in shown
    assert not {character for character in shown if character != "\n" and not character.isprintable()}
