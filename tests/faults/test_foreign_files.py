"""Every verb that writes leaves what others have put into its folders as it was: before, during and after it ran.

Seen to fail: `train visobert --out DIR` deleted a foreign DIR/model, `cache clear` any folder called *.new, `run --out`
appended to a foreign samples.jsonl.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fulltilt.recipes.synthetic import make_folder

JOB = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
    for (batch,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
"""
FEED = """
import sys, torch
from fulltilt import feed
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return torch.full((64,), float(i))
loader = feed.loader(Samples(), batch_size=4, residency="disk", cache_dir=sys.argv[1], cache_key="v1")
for _ in range(2):
    for batch in loader: pass
"""
KINDS = ("file", "read-only file", "folder", "read-only folder", "link", "link to folder", "dangling", "socket", "pipe")
# Names that Fulltilt uses for a moment, and names that earlier versions swept.
PASSING = (
    *(".lock", ".claim-0", "before-1", "before-1/run.json", "model", "model.new", "tokenizer", "old.new", "x.partial"),
    *(
        "checkpoints",
        "checkpoints/step-00000001",
        "checkpoints/step-00000001.partial",
        "scratch",
        "trial-1",
        "error.log",
    ),
    *("metrics.csv", "report.html", "findings.json", "settings.json", "samples.jsonl", ".fulltilt.x"),
)


def fulltilt(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fulltilt", *map(str, arguments)]


class Place:
    """A folder that a verb writes into, beside files that are none of its business."""

    def __init__(self, root: Path, verb: str, data: Callable[[str], Path]) -> None:
        self.root, self.verb = root, verb
        self.target = root / "target"
        self.outside = root / "outside"
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "file").write_text("outside")
        (self.outside / "folder" / "file").write_text("outside")
        (root / "job.py").write_text(JOB)
        (root / "feed_job.py").write_text(FEED)
        self._data = data

    def command(self) -> list[str]:
        target = self.target
        small = {
            "visobert": "--epochs 1 --batch-size 16 --vocab-size 200 --max-length 16 --hidden-size 32 "
            "--num-hidden-layers 1 --max-steps 3 --save-every 1",
            "cod": "--backbone test_resnet --img-size 32 --decoder-width 16 --num-experts 2 --epochs 1 "
            "--stage1-epochs 0 --batch-size 4 --stage2-batch-size 4 --workers 0 --max-steps 2 --save-every 1",
            "carclip": "--model small --image-size 32 --batch-size 6 --epochs 1 --workers 0 --max-steps 2 "
            "--save-every 1",
            "hdf5": "--epochs 1 --batch-size 24 --width 8 --heads 2 --workers 0 --max-steps 3 --save-every 1",
        }
        if self.verb in small:
            kind = {"visobert": "text", "carclip": "cars"}.get(self.verb, self.verb)
            return fulltilt("train", self.verb, "--data", self._data(kind), "--out", target, *small[self.verb].split())
        return {
            "run": lambda: fulltilt("run", "--out", target, "job.py"),
            "report": lambda: fulltilt("report", target),
            "html": lambda: fulltilt("report", self._data("run"), "--html", target / "report.html"),
            "make-data": lambda: fulltilt("make-data", "text", target, "--size", 20),
            "feed": lambda: [sys.executable, "feed_job.py", str(target)],
            "cache": lambda: fulltilt("cache", "clear", "--dir", target),
            "watch": lambda: fulltilt("watch", "--once", "--out", target / "samples.jsonl"),
            "tune": lambda: fulltilt("tune", "--budget", "20s", "--out", target, "job.py", 1_000_000),
        }[self.verb]()

    def start(self) -> subprocess.Popen[str]:
        output = (self.root / "output.txt").open("a")
        return subprocess.Popen(self.command(), cwd=self.root, stdout=output, stderr=subprocess.STDOUT, text=True)

    def run(self) -> tuple[int, str]:
        code = self.start().wait(timeout=400)
        return code, (self.root / "output.txt").read_text()

    def names(self) -> list[str]:
        found = [path.relative_to(self.target).as_posix() for path in self.target.rglob("*")]
        return [name for name in {*found, *PASSING} if name != ".fulltilt"]


def plant(place: Place, rng: random.Random, names: Sequence[str], replacing: bool) -> dict[Path, object]:
    """Put entries of all kinds at some of the names, in the place of what is there only if ``replacing``."""
    planted = []
    for name in rng.sample(sorted(names), min(len(names), rng.randint(1, 6))):
        path = place.target / name
        if os.path.lexists(path):
            if not replacing or (path.is_dir() and not path.is_symlink()):
                continue
            path.unlink()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path, rng.choice(KINDS), place.outside)
        except (FileExistsError, NotADirectoryError):
            continue  # the job was quicker, or another entry lies in the way
        planted.append(path)
    return snapshot([*planted, place.outside])


def make(path: Path, kind: str, outside: Path) -> None:
    if kind.endswith("folder") and not kind.startswith("link"):
        path.mkdir()
        (path / "inner.txt").write_text("mine")
        path.chmod(0o555 if kind.startswith("read-only") else 0o755)
    elif kind == "link":
        path.symlink_to(outside / "file")
    elif kind == "link to folder":
        path.symlink_to(outside / "folder")
    elif kind == "dangling":
        path.symlink_to(outside / "nothing")
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may not be long
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        except OSError as error:
            raise FileExistsError from error
        finally:
            os.chdir(here)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("x") as file:
            file.write(f"mine: {path.name}\n")
        path.chmod(0o444 if kind.startswith("read-only") else 0o640)


def snapshot(roots: Sequence[Path]) -> dict[Path, object]:
    seen: dict[Path, object] = {}
    for root in roots:
        for path in [root, *(root.rglob("*") if root.is_dir() and not root.is_symlink() else ())]:
            status = path.lstat()
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                content = str(path.readlink())
            elif stat.S_ISDIR(status.st_mode):
                content = sorted(os.listdir(path)) if path != root or root.name == "outside" else None
            seen[path] = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), content)
    return seen


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("data")

    def made(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            if kind == "run":
                (root / "job.py").write_text(JOB)
                subprocess.run(fulltilt("run", "--out", folder, "job.py"), cwd=root, check=True, capture_output=True)
            else:
                make_folder(kind, folder, {"text": 40, "cod": 8, "cars": 16, "hdf5": 96}[kind], 0)
        return folder

    return made


def fresh(place: Place) -> None:
    """A folder of the verb's own, as it leaves it."""
    if place.verb in ("report", "cache"):
        writer = Place.__new__(Place)
        writer.__dict__.update(place.__dict__, verb={"report": "run", "cache": "feed"}[place.verb])
        assert writer.run()[0] == 0
    elif place.verb == "html":
        place.target.mkdir()
    elif place.verb == "watch":
        place.target.mkdir()
        assert place.run()[0] == 0
    else:
        code, output = place.run()
        assert code in (0, 3), output


def check_before(place: Place, seed: int) -> None:
    rng = random.Random(f"{place.verb}{seed}")
    place.target.mkdir()
    before = plant(place, rng, PASSING, replacing=False)
    code, output = place.run()
    assert snapshot_of(before) == before, output
    assert "Traceback" not in output, output
    assert code in ((0, 2, 4, 7) if place.verb in ("feed", "cache", "html", "watch") else (2, 7)), output


def check_again(place: Place, seed: int) -> None:
    rng = random.Random(f"{place.verb}{seed}")
    fresh(place)
    before = plant(place, rng, place.names(), replacing=True)
    _, output = place.run()
    assert snapshot_of(before) == before, output
    assert "Traceback" not in output, output


def check_during(place: Place, seed: int) -> None:
    rng = random.Random(f"{place.verb}{seed}")
    process = place.start()
    while process.poll() is None and not list(place.target.glob("*")):
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 2))
    if not place.target.exists():
        pytest.skip("it had ended already")
    before = plant(place, rng, place.names(), replacing=False)
    process.wait(timeout=400)
    output = (place.root / "output.txt").read_text()
    assert snapshot_of(before) == before, output
    assert "Traceback" not in output, output


def snapshot_of(before: dict[Path, object]) -> dict[Path, object]:
    now = {}
    for path in before:
        try:
            entry = next(iter(snapshot([path]).values()))
        except FileNotFoundError:
            entry = "gone"
        # A folder's own list is compared only where it was noted.
        noted = before[path]
        if isinstance(entry, tuple) and isinstance(noted, tuple) and stat.S_ISDIR(entry[0]):
            listed = sorted(os.listdir(path)) if noted[2] is not None else None
            entry = (entry[0], entry[1], listed)
        now[path] = entry
    return now


CHECKS = {"before": check_before, "again": check_again, "during": check_during}
QUICK = [("run", "again")]
ALL = [(verb, moment) for verb in ("run", "report", "html", "make-data", "feed", "cache", "watch") for moment in CHECKS]
ALL += [(verb, moment) for verb in ("visobert", "cod", "carclip", "hdf5", "tune") for moment in CHECKS]
SEEDS = int(os.environ.get("FOREIGN_FILES_SEEDS", "4"))


@pytest.mark.parametrize(("verb", "moment"), QUICK)
def test_foreign_entries_stay_as_they_were(verb: str, moment: str, tmp_path: Path, data: Callable[[str], Path]) -> None:
    CHECKS[moment](Place(tmp_path, verb, data), 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("verb", "moment"), ALL)
def test_foreign_entries_stay_in_many_places(
    verb: str, moment: str, seed: int, tmp_path: Path, data: Callable[[str], Path]
) -> None:
    CHECKS[moment](Place(tmp_path, verb, data), seed)
