"""The run folder survives a kill at any byte, a full disk and several writers; damage is named by file and line."""

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fulltilt import store
from fulltilt.errors import RunFolderError
from fulltilt.records import (
    SCHEMA_VERSION,
    Buckets,
    CpuCapacity,
    GpuReading,
    HostReading,
    Machine,
    RankRecord,
    Run,
    RunRecord,
    Sample,
    Span,
)
from fulltilt.store import owned_folder

MACHINE = Machine(
    hostname="box",
    platform="Linux",
    python="3.11.7",
    torch="2.15.0",
    cuda=None,
    driver=None,
    cpu=CpuCapacity(present=2, affinity=2, quota=0.5, usable=0.5),
    mem_total_bytes=1 << 34,
    mem_limit_bytes=None,
    shm_total_bytes=1 << 26,
    shm_free_bytes=1 << 26,
)


def a_span(step: int) -> Span:
    return Span(step / 10, (step + 1) / 10, step, 1, 1, 32, Buckets(compute_s=0.07, data_wait_s=0.03))


def a_sample(step: int) -> Sample:
    gpu = GpuReading("GPU-1", 0, "Tesla T4", util_pct=float(step % 100), throttle_reasons=())
    return Sample(float(step), HostReading(cpu_pct=12.5, cpu_per_core_pct=(10.0, 15.0)), (gpu,))


def a_rank(rank: int) -> RankRecord:
    return RankRecord(rank, 2, 100 + rank, "box", "cpu", None, 0.0, 2.0, True, 20, 20, optimizers=("Adam",))


def write_run(folder: Path, ranks: int = 2, steps: int = 20) -> Run:
    """A small run folder, and what reading it must give."""
    store.create_folder(folder)
    record = RunRecord("tränen", ("python", "tränen.py"), "2026-01-01T00:00:00Z", MACHINE, "0.1.0", "done", 2.0, 0)
    store.write_json(folder / store.RUN_FILE, record)
    spans = tuple(a_span(step) for step in range(steps))
    samples = tuple(a_sample(step) for step in range(10))
    for rank in range(ranks):
        store.write_json(folder / store.rank_file(rank), a_rank(rank))
        writer = store.LineWriter(folder / store.steps_file(rank))
        writer.write(spans)
        writer.close()
    writer = store.LineWriter(folder / store.SAMPLES_FILE)
    writer.write(samples)
    writer.close()
    store.write_json(folder / store.FINDINGS_FILE, {"schema_version": SCHEMA_VERSION, "findings": []})
    return Run(str(folder), record, tuple(a_rank(n) for n in range(ranks)), (spans,) * ranks, samples)


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    expected = write_run(tmp_path / "run")
    assert store.load(tmp_path / "run") == expected


# --------------------------------------------------------------------------- a script that closes what is not its own


def test_no_descriptor_of_ours_stays_open_for_a_script_to_close(tmp_path: Path) -> None:
    """Daemons close every descriptor and open files of their own, which would then have our number."""
    before = len(os.listdir("/proc/self/fd"))
    writer = store.LineWriter(tmp_path / "samples.jsonl")
    writer.write([a_sample(0)])
    assert len(os.listdir("/proc/self/fd")) == before
    writer.write([a_sample(1)])
    writer.close()
    assert list(store.read_lines(writer.path, Sample)) == [a_sample(0), a_sample(1)]


def test_a_file_that_took_the_place_of_ours_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    writer = store.LineWriter(path)
    path.rename(tmp_path / "aside.jsonl")
    path.write_text('{"of": "the next run"}\n')
    with pytest.raises(RunFolderError, match="another file has replaced it"):
        writer.write([a_sample(0)])
    assert path.read_text() == '{"of": "the next run"}\n'


# --------------------------------------------------------------------------- killed at any byte


def positions(data: bytes, chance: random.Random) -> list[int]:
    """One position of every class: the ends, around a newline, inside a line, anywhere."""
    newlines = [i for i, byte in enumerate(data) if byte == 0x0A]
    newline = chance.choice(newlines)
    start = data.rfind(b"\n", 0, newline) + 1
    return [
        0,
        1,
        len(data) - 1,
        len(data),
        newline,
        newline + 1,
        chance.randint(start, newline),
        chance.randrange(len(data)),
    ]


def load_everything(folder: Path) -> Run | RunFolderError:
    try:
        store.read_json(folder / store.FINDINGS_FILE)
        return store.load(folder)
    except RunFolderError as error:
        return error


def cut_lines(whole: Run, file: str, complete: int) -> Run:
    """What is left of a run when ``file`` keeps only its first complete lines."""
    spans = tuple(s[:complete] if file == store.steps_file(n) else s for n, s in enumerate(whole.spans))
    samples = whole.samples[:complete] if file == store.SAMPLES_FILE else whole.samples
    return dataclasses.replace(whole, spans=spans, samples=samples)


@pytest.mark.slow
def test_a_thousand_truncations_read_or_give_the_clear_error_and_lose_no_complete_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = write_run(folder)
    files = sorted(path for path in folder.iterdir() if path.name != ".fulltilt")
    assert len(files) == 7
    chance = random.Random(20260101)
    tried = refused = 0
    while tried < 1000:
        for path in files:
            data = path.read_bytes()
            for position in positions(data, chance):
                os.truncate(path, position)
                found = load_everything(folder)
                if isinstance(found, RunFolderError):
                    assert path.suffix == ".json", f"{path.name} cut at {position}: {found}"
                    assert f"{path}, line " in str(found)
                    refused += 1
                else:
                    assert found == cut_lines(whole, path.name, data[:position].count(b"\n"))
                path.write_bytes(data)
                tried += 1
    assert tried * 0.3 < refused < tried * 0.6  # both ends were met


@pytest.mark.parametrize("cut", ["before the newline", "inside the last line", "inside the only line", "nothing"])
def test_a_writer_goes_on_after_a_torn_line(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "samples.jsonl"
    writer = store.LineWriter(path)
    writer.write(a_sample(i) for i in range(1 if cut == "inside the only line" else 3))
    writer.close()
    data = path.read_bytes()
    if cut == "before the newline":
        os.truncate(path, len(data) - 1)  # the object is whole: it is kept
        kept = 3
    elif cut == "nothing":
        kept = 3
    else:
        os.truncate(path, len(data) - 10)
        kept = data.count(b"\n") - 1
    again = store.LineWriter(path)
    again.write([a_sample(7)])
    again.close()
    assert list(store.read_lines(path, Sample)) == [*(a_sample(i) for i in range(kept)), a_sample(7)]


def test_a_file_goes_on_after_a_second_writer_was_killed(tmp_path: Path) -> None:
    path = store.create_folder(tmp_path / "study") / "trials.jsonl"
    for last in (0, 1, 2):  # the first one ends, the others are killed before they close the file
        writer = store.LineWriter(path)
        writer.write([a_sample(last)])
        if not last:
            writer.close()
        owned_folder._known.clear()  # as in another process
    assert list(store.read_lines(path, Sample)) == [a_sample(i) for i in range(3)]


def test_a_long_torn_line_is_dropped_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":"' + b"x" * 300_000)
    store.LineWriter(path).close()
    assert path.read_bytes() == b'{"a":1}\n'


@pytest.mark.parametrize("content", [b"my notes", b"a,b\n1,2\n", b"\x80\x04model", b"\n"])
def test_a_file_of_the_users_is_never_cut_or_appended_to(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="was not written by Fulltilt"):
        store.LineWriter(path)
    assert path.read_bytes() == content


# --------------------------------------------------------------------------- several writers

WRITER = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from fulltilt import store
    from fulltilt.records import Buckets, Span

    folder, rank, torn = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "torn"
    writer = store.LineWriter(folder / store.steps_file(rank))
    real = os.write
    for step in range(200):
        if torn and step == 150:
            def half_then_die(fd, data):
                real(fd, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            os.write = half_then_die
        writer.write([Span(step / 10, (step + 1) / 10, step, 1, 1, 32, Buckets(compute_s=0.07, data_wait_s=0.03))])
    """
)


def test_ranks_write_side_by_side_and_one_is_killed_in_mid_write(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store.create_folder(folder)
    store.write_json(folder / store.RUN_FILE, RunRecord("r", (), "2026-01-01T00:00:00Z", MACHINE, "0.1.0"))
    for rank in range(3):
        store.write_json(folder / store.rank_file(rank), a_rank(rank))
    ranks = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(rank), "torn" if rank == 1 else "whole"])
        for rank in range(3)
    ]
    seen = [0, 0, 0]
    while any(rank.poll() is None for rank in ranks):  # a reader beside them sees whole lines, in order
        for rank, spans in enumerate(store.load(folder).spans):
            assert list(spans) == [a_span(step) for step in range(len(spans))]
            assert len(spans) >= seen[rank]
            seen[rank] = len(spans)
    assert [rank.wait() for rank in ranks] == [0, -signal.SIGKILL, 0]
    assert not (folder / store.steps_file(1)).read_bytes().endswith(b"\n")
    assert [len(spans) for spans in store.load(folder).spans] == [200, 150, 200]


def test_a_writer_killed_at_a_random_moment_leaves_whole_lines(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from fulltilt import store\n"
        "writer = store.LineWriter(Path(sys.argv[1]))\n"
        "while True: writer.write([{'n': n, 'fill': 'x' * 200_000} for n in range(20)])"
    )
    path = tmp_path / "lines.jsonl"
    child = subprocess.Popen([sys.executable, "-c", script, str(path)])
    while not path.exists() or path.stat().st_size < 10_000_000:
        assert child.poll() is None
        time.sleep(0.005)
    child.kill()
    child.wait()
    before = path.read_bytes().count(b"\n")
    writer = store.LineWriter(path)
    writer.write([{"n": -1}])
    writer.close()
    numbers = [json.loads(line)["n"] for line in path.read_bytes().splitlines()]
    assert numbers[-1] == -1
    assert numbers[:before] == [n % 20 for n in range(before)]


# --------------------------------------------------------------------------- a full disk

FULL_DISK = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from fulltilt import store
    from fulltilt.errors import RunFolderError

    path = Path(sys.argv[1])
    writer = store.LineWriter(path)
    writer.write([{"n": 0}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        writer.write([{"n": 1}, {"n": 2, "fill": "x" * 2000}])
    except RunFolderError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write([{"n": 3}])
    """
)


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_batch_the_disk_has_no_room_for_is_taken_back_and_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    said = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"cannot write {path}: ")
    assert path.read_bytes() == b'{"n":0}\n{"n":3}\n'


def test_a_json_file_holds_the_old_content_when_the_new_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.create_folder(tmp_path / "run") / "run.json"
    store.write_json(path, {"n": 1})

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match="No space left"):
        store.write_json(path, {"n": 2})
    assert store.read_json(path) == {"n": 1}
    assert sorted(p.name for p in path.parent.iterdir()) == [".fulltilt", "run.json"]


# --------------------------------------------------------------------------- damage and other versions


def test_the_schema_version_always_stands_in_the_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert json.loads((tmp_path / store.RUN_FILE).read_text())["schema_version"] == SCHEMA_VERSION


def test_a_newer_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / store.RUN_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(RunFolderError) as caught:
        store.load(tmp_path)
    assert str(path) in caught.value.what
    assert "newer Fulltilt" in caught.value.what
    assert caught.value.remedy == "Update with: pip install --upgrade fulltilt"


@pytest.mark.parametrize(
    ("file", "line", "content"),
    [
        ("steps.jsonl", 3, b"not json"),
        ("steps.jsonl", 1, b"{}"),
        ("steps.rank-1.jsonl", 20, b"\x00\x00\x00\x00"),
        ("samples.jsonl", 10, b'{"t_s": "soon", "host": {}}'),
        ("samples.jsonl", 5, b""),
        ("samples.jsonl", 2, b"[" * 100_000),
        ("samples.jsonl", 4, b'{"t_s": ' + b"9" * 5000 + b', "host": {}}'),
        ("samples.jsonl", 4, b'{"t_s": NaN, "host": {}}'),
        ("steps.jsonl", 4, b'{"t0_s": 1e999}'),
        ("samples.jsonl", 4, b"\xff\xfe"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(tmp_path: Path, file: str, line: int, content: bytes) -> None:
    write_run(tmp_path)
    path = tmp_path / file
    lines = path.read_bytes().split(b"\n")
    lines[line - 1] = content
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RunFolderError) as caught:
        store.load(tmp_path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "line 1"),
        (b'{\n "name": "x",\n "command": [', "line 3"),
        (b"[]", "should be an object"),
        (b"{}", "name is missing"),
        (b'{"schema_version": "two"}', "schema_version should be a number"),
        (b'{"schema_version": true}', "schema_version should be a number"),
        (b"9" * 5000, "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"\xff\xfe{}", "damaged"),
    ],
)
def test_a_damaged_run_file_gives_a_clear_error(tmp_path: Path, content: bytes, complaint: str) -> None:
    write_run(tmp_path)
    (tmp_path / store.RUN_FILE).write_bytes(content)
    with pytest.raises(RunFolderError, match=complaint) as caught:
        store.load(tmp_path)
    assert str(tmp_path / store.RUN_FILE) in str(caught.value)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_read_only_file_system_is_a_run_folder_error(
    claimed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: deleting the temporary file raised first, and `fulltilt report` of a run there showed nothing."""
    folder = tmp_path / "run"
    store.create_folder(folder) if claimed else folder.mkdir()
    real = os.open

    def read_only(path: str | Path, flags: int, *given: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *given)

    def refuse(self: Path, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.html: Read-only file system"):
        store.write_text(folder / "report.html", "page")


def test_what_is_no_run_folder_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, complaint in (("nowhere", "no such folder"), ("file", "it is a file"), ("empty", "has no run.json")):
        with pytest.raises(RunFolderError, match=complaint):
            store.load(tmp_path / name)


def test_spans_without_their_ranks_record_are_left_out_with_a_warning(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / store.rank_file(1)).unlink()
    run = store.load(tmp_path)
    assert len(run.spans) == len(run.ranks) == 1
    assert run.warnings == ("steps.rank-1.jsonl was not read: the record of its rank is missing",)


def test_a_run_folder_may_be_given_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = write_run(Path("run"))
    assert store.load("run") == expected
    assert store.move_earlier_run(Path("run")) == Path("run/before-1")
    assert (tmp_path / "run" / "before-1" / "run.json").exists()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1e308", "9" * 400])
def test_a_figure_that_is_not_finite_was_not_measured(tmp_path: Path, number: str) -> None:
    whole = write_run(tmp_path)
    changes = ((store.SAMPLES_FILE, '"cpu_pct":12.5'), (store.steps_file(0), '"compute_s":0.07'))
    for name, figure in (*changes, (store.RUN_FILE, '"wall_s": 2.0')):
        path = tmp_path / name
        path.write_text(path.read_text().replace(figure, f"{figure.partition(':')[0]}:{number}"))
    run = store.load(tmp_path)
    assert run.run == dataclasses.replace(whole.run, wall_s=None)
    assert {sample.host.cpu_pct for sample in run.samples} == {None}
    assert {span.buckets for span in run.spans[0]} == {Buckets(data_wait_s=0.03)}
    assert run.spans[1] == whole.spans[1]


def test_a_path_that_is_not_utf8_survives(tmp_path: Path) -> None:
    name = os.fsdecode(b"tr\xe4nen.py")
    record = RunRecord(name, ("python", name), "2026-01-01T00:00:00Z", MACHINE, "0.1.0")
    store.write_json(tmp_path / store.RUN_FILE, record)
    writer = store.LineWriter(tmp_path / "names.jsonl")
    writer.write([{"name": name}])
    writer.close()
    store.write_text(tmp_path / store.REPORT_FILE, f"<p>{name}")
    assert store.load(tmp_path).run == record
    assert json.loads((tmp_path / "names.jsonl").read_bytes()) == {"name": name}


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot write into") as caught:
        store.create_folder(tmp_path / "file" / "run")
    assert caught.value.exit_code == 7
    assert caught.value.remedy == "Choose another folder with --out."


def test_two_jobs_started_together_get_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # each looks before the other one has created it
    made = {store.create_new_folder(Path("fulltilt-runs/train")) for _ in range(3)}
    assert {folder.name for folder in made} == {"train", "train-2", "train-3"}
