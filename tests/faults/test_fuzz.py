"""Hostile files: thousands of structure-aware mutations each end in an answer or in one clear error.

No traceback, no code that runs, nothing written or read outside, no hang, bounded memory. `FUZZ_MUTATIONS` says how
many of each (10,000 in the long suite), `FUZZ_SHARDS` into how many tests they are divided (`-n` spreads them), and
`FUZZ_SEED` draws others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from fulltilt import recipes, store
from fulltilt.cli.streams import complain
from fulltilt.cli.tune import end_study
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError
from fulltilt.feed.disk_cache import CacheFull, list_caches, open_cache
from fulltilt.feed.sample_layout import layout_of
from fulltilt.recipes import options
from fulltilt.recorder.loaders.settings_file import read_loader, read_settings
from fulltilt.records import Settings, Trial
from fulltilt.report import page, terminal
from fulltilt.report.answer import to_plain
from fulltilt.train import Job, TrainSettings, checkpoint, train
from fulltilt.train.progress import TrainingScreen
from fulltilt.tuning.search_space import Space
from fulltilt.tuning.study import KIND, STUDY_FILE, TRIALS_FILE, Study, StudyRecord, next_step
from fulltilt.tuning.trial.isolation import Isolation
from tests.diagnosis.examples import loader

MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "10000"))
SHARDS = int(os.environ.get("FUZZ_SHARDS", "1"))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0")) * 1_000_000
QUICK = 12
LONGEST_S = 20
MOST_MORE_BYTES = 2 * 2**30
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "a" * 5000, "\x00", "\ud800", "Tʜé\u202eevil"),
    *("\x1b[31m\x1b]0;t\x07", "<script>alert(1)</script>", "[bold red]x[/]", "../../etc/passwd", "/dev/zero"),
    *([], {}, [[]], [None], {"__reduce__": ["os.system", ["touch owned"]]}, {"$tensor": "x"}, {"$items": [[1]]}),
)
YAML_LINES = (
    "x: !!python/object/apply:os.system ['touch owned']",
    "a: &a [x, x]\nb: &b [*a, *a]",
    "epochs: 1_0",
    "lr: .inf",
    "seed: 0x7fffffffffffffffff",
    "out: 2020-13-45",
    "? [a, b]\n: c",
    "---\nepochs: 2",
    "%YAML 9.9",
    "lr: 1:30:00",
    "\tlr: 1",
)


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


# --------------------------------------------------------------------------- mutations


def hostile(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        deep: Any = 1
        for _ in range(rng.choice((10, 200, 3000))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(HOSTILE)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += spots(inner, (*path, key))
    return found


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with one to three of its parts exchanged, dropped, doubled or moved."""
    places = spots(value)
    for path in rng.sample(places, min(len(places), rng.randint(1, 3))):
        if not path:
            if rng.random() < 0.1:
                value = hostile(rng)
            continue
        try:
            parent = value
            for key in path[:-1]:
                parent = parent[key]
            if not isinstance(parent, dict | list):
                continue
            parent[path[-1]]
        except (TypeError, LookupError):
            continue  # it went with the change before
        action = rng.random()
        if action < 0.7:
            parent[path[-1]] = hostile(rng)
        elif action < 0.8 and isinstance(parent, dict):
            parent[rng.choice(("x", "", "$tuple", "step", "\x1b]0;"))] = parent.pop(path[-1])
        elif action < 0.85 or isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent.insert(path[-1], parent[path[-1]])
    return value


def mutate_json(text: str, rng: random.Random) -> str:
    try:
        return json.dumps(mutate_value(json.loads(text), rng))
    except RecursionError:
        return "[" * 5000
    except ValueError:
        return text


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut off, doubled or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        action = rng.random()
        if action < 0.4 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif action < 0.6:
            del changed[at : at + rng.randint(1, 40)]
        elif action < 0.8:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del changed[at:]
    return bytes(changed)


def mutate_lines(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    action = rng.random()
    if action < 0.8:
        lines[at] = mutate_json(lines[at], rng)
    elif action < 0.9:
        lines.insert(at, lines[at])
    else:
        rng.shuffle(lines)
    return "\n".join(lines) + "\n"


def mutate_yaml(text: str, rng: random.Random) -> str:
    if rng.random() < 0.3:
        lines = text.splitlines()
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(YAML_LINES))
        return "\n".join(lines)
    with contextlib.suppress(RecursionError, ValueError):
        return str(yaml.safe_dump(mutate_value(yaml.safe_load(text), rng)))
    return "[" * 5000


def mutate_tensors(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header in front of its data."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(data[8:end].decode(), rng).encode()
    return len(header).to_bytes(8, "little") + header + data[end:]


def mutate_file(path: Path, rng: random.Random, outside: Path) -> None:
    data = path.read_bytes()
    text = data.decode("utf-8", "replace")
    action = rng.random()
    if action < 0.06:
        path.unlink()
        kind = rng.randrange(6)
        if kind == 0:  # a config is named by the user, who may name a link
            path.symlink_to("missing" if path.stem in ("train", "settings") else outside / "secret.json")
        elif kind == 1:
            path.symlink_to("/dev/zero")
        elif kind == 2:
            os.mkfifo(path)
        elif kind == 3:
            path.mkdir()
        elif kind == 4:
            path.write_bytes(pickle.dumps(Bomb()))
        return
    if action < 0.3 or not data:
        data = mutate_bytes(data, rng)
    elif path.suffix == ".safetensors":
        data = mutate_tensors(data, rng)
    elif path.suffix == ".yaml":
        data = mutate_yaml(text, rng).encode("utf-8", "replace")
    elif path.suffix == ".jsonl" or path.name == ".fulltilt":
        data = mutate_lines(text, rng).encode("utf-8", "replace")
    elif path.suffix == ".json":
        data = mutate_json(text, rng).encode("utf-8", "replace")
    else:
        data = mutate_bytes(data, rng)
    path.write_bytes(data)


def seal(folder: Path) -> None:
    """Make the sums of a checkpoint right again, as whoever wants to be believed would."""
    for manifest in folder.rglob("manifest.json"):
        if manifest.is_symlink() or not manifest.is_file():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            body = json.loads(manifest.read_bytes())
            del body["manifest_sha256"]
            for name in body["files"]:
                if (file := manifest.with_name(name)).is_file() and not file.is_symlink():
                    data = file.read_bytes()
                    body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            manifest.write_bytes(checkpoint._seal(body))


# --------------------------------------------------------------------------- what is made, and how it is read

JOB = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for (batch,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, num_workers=1):
        model(batch).sum().backward()
        optimizer.step()
"""


def make_run(folder: Path) -> None:
    (folder.parent / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "fulltilt", "run", "--out", str(folder), "job.py"]
    subprocess.run(command, cwd=folder.parent, check=True, capture_output=True, timeout=150)
    for name in (".fulltilt", "report.html", "findings.json", ".claim-0"):
        (folder / name).unlink(missing_ok=True)


def show_run(folder: Path) -> None:
    run = store.load(folder)
    diagnosis = answer(run)
    json.dumps(to_plain(diagnosis, run), allow_nan=False)
    html = page.render([(run, diagnosis)])
    assert "<script>alert" not in html
    output = io.StringIO()
    terminal.show(Console(file=output, width=80), [(run, diagnosis)])
    assert "\x1b]0;" not in output.getvalue()


ROWS = torch.arange(96, dtype=torch.float32).view(12, 8)
LAYOUT = layout_of(ROWS[0])


def make_cache(folder: Path) -> None:
    for name, count in (("whole", len(ROWS)), ("half", len(ROWS) // 2)):
        cache, _ = open_cache(folder, name, LAYOUT, len(ROWS))
        cache.write(torch.arange(count), ROWS[:count].view(torch.uint8))
        cache.finish()
        cache.close()


def read_cache(folder: Path) -> None:
    """What a cache hands out is what was put in, or it is not there."""
    list_caches(folder)
    for name in ("whole", "half"):
        try:
            cache, _ = open_cache(folder, name, LAYOUT, len(ROWS))
        except CacheFull:
            continue  # the job goes on without it
        there = cache.has(torch.arange(len(ROWS))).nonzero().flatten()
        rows = cache.rows[there].view(torch.float32)
        cache.close()
        assert torch.equal(rows, ROWS[there]), f"wrong samples from {name}"


def train_on(folder: Path, **settings: Any) -> None:
    torch.manual_seed(0)
    job = Job(model=torch.nn.Linear(4, 1), loss=lambda model, batch: (model(batch).mean(), {}), data=ROWS.view(24, 4))
    known = {"epochs": 1, "batch_size": 8, "device": "cpu", "record": False, "ema_decay": 0.9}
    screen = TrainingScreen(folder, stream=io.StringIO(), sampled=False)
    train(job, TrainSettings(**{**known, **settings}), folder, screen=screen)
    assert "\x1b]0;" not in screen.stream.getvalue()


def make_config(folder: Path) -> None:
    folder.mkdir()
    given: dict[str, Any] = {"epochs": 3, "lr": 0.001, "batch_size": 8, "max_time": "11h", "compile": False, "out": "x"}
    (folder / "train.json").write_text(json.dumps(given))
    (folder / "train.yaml").write_text(yaml.safe_dump(given))
    (folder / "settings.json").write_text(json.dumps({"num_workers": 2, "pin_memory": True, "loader": "train.py:3"}))


def read_config(folder: Path) -> None:
    refused = []
    names = (*recipes.RECIPES, *recipes.RECIPES)
    of_recipes = [
        partial(options.read, recipes.find(name), {})
        for name in names[sum(path.lstat().st_size for path in folder.iterdir()) % 4 :][:2]
    ]
    for name, read in zip(("train.json", "train.yaml", "settings.json"), (*of_recipes, read_settings), strict=True):
        try:
            if read(folder / name) and read is read_settings:
                read_loader(folder / name)
        except FulltiltError as error:
            refused.append(error)
    if refused:
        raise refused[0]


def make_study(folder: Path) -> None:
    store.OwnedFolder.claim(folder, KIND)
    start = Trial(Settings(), "ok", 9.0, 8.5, 9.5, 40, purpose="start", in_force=Settings(num_workers=0), wall_s=4.0)
    faster = replace(start, settings=Settings(num_workers=2), in_force=Settings(num_workers=2), samples_per_s=20.0)
    trials = [start, replace(faster, purpose="search"), replace(faster, state="oom", purpose="search")]
    trials += [replace(trial, purpose="verify") for _ in range(5) for trial in (start, faster)]
    record = StudyRecord(("job.py",), str(folder.parent), (), "today", loader(where="job.py:6"))
    store.write_json(folder / STUDY_FILE, replace(record, optimizer="AdamW", learning_rate=0.1))
    with contextlib.closing(store.LineWriter(folder / TRIALS_FILE)) as writer:
        writer.write(trials)


def read_study(folder: Path) -> None:
    record_file = folder / STUDY_FILE
    with contextlib.suppress(OSError, ValueError, RecursionError):  # else every copy is a study of elsewhere
        if record_file.is_file() and not record_file.is_symlink():
            plain = json.loads(record_file.read_text())
            if isinstance(plain, dict) and isinstance(plain.get("working_folder"), str):
                record_file.write_text(json.dumps({**plain, "working_folder": str(Path.cwd())}))
    study = Study(["job.py"], ["python", "job.py"], folder, Space(2), Isolation("none"), None, lambda _: None)
    try:
        next_step(study.trials, study.space, 100.0)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            end_study(study.record, study.trials, folder, apply=False)
        assert "\x1b]0;" not in shown.getvalue()
    finally:
        study.close()


# What is made, how it is read, and whether reading it may write into it.
Target = tuple[Callable[[Path], None], Callable[[Path], None], bool]
TARGETS: dict[str, Target] = {
    "run": (make_run, show_run, False),
    "cache": (make_cache, read_cache, True),
    "checkpoint": (lambda folder: train_on(folder, max_steps=1), train_on, True),
    "config": (make_config, read_config, False),
    "study": (make_study, read_study, True),
}


# --------------------------------------------------------------------------- the watch over it

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
RUNS = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
_watched: dict[str, Any] = {}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in RUNS:
        _watched["seen"].append(f"{event} {arguments[:2]}")
    elif event in CHANGES or event == "open":
        path, flags = arguments[0], arguments[2] if event == "open" else WRITING
        if not isinstance(path, (str, bytes)) or not isinstance(flags, int) or os.fsdecode(path)[:1] != "/":
            return  # a descriptor, or a name below one
        follows = event == "open" and not flags & os.O_NOFOLLOW
        real = (os.path.realpath if follows else os.path.abspath)(os.fsdecode(path))
        elsewhere = flags & WRITING and not real.startswith((*_watched["writable"], os.devnull, sys.prefix))
        if real.startswith(_watched["outside"]) or elsewhere:
            _watched["seen"].append(f"{event} {real}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(outside: Path, writable: tuple[str, ...]) -> Iterator[None]:
    """Fails for code that was run, for files written elsewhere or read outside, for a hang, for memory."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"no answer after {LONGEST_S} s")

    seen: list[str] = []
    size, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, too_long)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MORE_BYTES, size[1]))
    signal.alarm(LONGEST_S)
    _watched.update(seen=seen, outside=str(outside), writable=writable)
    try:
        yield
    finally:
        _watched.clear()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, size)
    assert not seen, seen


def outcome(read: Callable[[Path], None], folder: Path) -> str:
    try:
        read(folder)
    except FulltiltError as error:
        if not 2 <= error.exit_code <= 7:
            raise AssertionError(f"exit code {error.exit_code}: {error}") from error
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            complain(str(error))
        if "\x1b" in shown.getvalue():
            raise AssertionError("escape sequences reach the terminal") from error
        return "refused"
    return "read"


def fuzz(target: Target, root: Path, seeds: range) -> dict[str, int]:
    """Read mutated copies of a folder; how many were read and how many refused."""
    make, read, writes = target
    source, outside, folder = root / "source", root / "outside", root / "mutated"
    make(source)
    outside.mkdir()
    (outside / "secret.json").write_text('{"secret": 1}')
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    writable = (str(folder), tempfile.gettempdir()) if writes else ()
    counts, failures = {"read": 0, "refused": 0}, []
    for seed in seeds:
        rng = random.Random(seed)
        shutil.copytree(source, folder)
        for name in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
            mutate_file(folder / name, rng, outside)
        if rng.random() < 0.8:
            seal(folder)
        try:
            with watched(outside, writable):
                counts[outcome(read, folder)] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"seed {seed}: {type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
            )
        shutil.rmtree(folder)
        if len(failures) >= 20:
            break
    assert not failures, "\n".join(failures)
    assert not Path("owned").exists()
    assert sorted(os.listdir(outside)) == ["secret.json"]
    assert counts["read"] > len(seeds) / 20
    return counts


def shard(number: int) -> range:
    each = -(-MUTATIONS // SHARDS)
    return range(FIRST_SEED + number * each, FIRST_SEED + (number + 1) * each)


LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]
SEEDS = [pytest.param(range(QUICK), id="quick")]
SEEDS += [pytest.param(shard(number), id=f"shard-{number}", marks=LONG) for number in range(SHARDS)]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_files_are_read_or_refused(
    name: str, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    counts = fuzz(TARGETS[name], tmp_path, seeds)
    print(f"{name}: {len(seeds)} mutations, {counts['read']} read, {counts['refused']} refused")
