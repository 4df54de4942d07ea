"""`fulltilt run --auto` as a user starts it, on jobs with random augmentation, against the best of a sweep.

    python bench/auto.py --jobs resnet --out auto.json        on a GPU; six minutes on an H200 with 16 CPUs
    python bench/auto.py --small --out auto.json              a tiny trial run on a CPU

For each job: plain runs with 4, 8 and so on workers, up to the number of CPUs, with pinned memory; then, round by
round, a run with ``--auto`` from 0, 2 and 4 workers, unpinned, between two plain runs of the sweep's best. A rate is
that of the last seconds of a run. ``reached`` is the median over the rounds of the tuned rate over the plain best of
the same round. Figures go to OUT after each run, and a second call with the same OUT adds rounds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from children import IN_MEMORY, versions
from feedbench.images import MEAN, STD, make_images
from torch import nn
from torch.utils.data import DataLoader, Dataset

STARTS = (0, 2, 4)
# How long a run trains, and how much of its end is measured: tuned, and plain.
TUNED_S, PLAIN_S, MEASURED_S = 75.0, 14.0, 10.0
BATCH = {"resnet": 128, "augmented": 64, "text": 256}


class Pictures(Dataset[Any]):
    """JPEG files, augmented at random as image trainers do."""

    def __init__(self, folder: Path, heavy: bool, small: bool) -> None:
        from torchvision.transforms import v2

        self.files = sorted(folder.glob("*.jpg"))
        more = [v2.RandAugment(), v2.ColorJitter(0.4, 0.4, 0.4)] if heavy else []
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(32 if small else 224),
                v2.RandomHorizontalFlip(),
                *more,
                v2.PILToTensor(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(list(MEAN), list(STD)),
            ]
        )

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            return self.transform(image.convert("RGB")), index % 10


class Texts(Dataset[Any]):
    """Texts split into words and masked at random, in Python, as language-model trainers do."""

    def __init__(self, small: bool) -> None:
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(2000)]
        self.texts = [" ".join(draw.choices(words, k=20 if small else 128)) for _ in range(2000)]
        self.ids = {word: number + 2 for number, word in enumerate(words)}

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = []
        for word in self.texts[index % len(self.texts)].split():
            pieces = [word[at : at + 3] for at in range(0, len(word), 3)]
            ids.append(self.ids["".join(piece.lower() for piece in pieces)])
        tokens = torch.tensor(ids)
        return torch.where(torch.rand(len(tokens)) < 0.15, 1, tokens), tokens


class Reader(nn.Module):
    """A small language model."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        width = 32 if small else 256
        self.embed = nn.Embedding(2002, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1 if small else 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2002)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embed(tokens))).transpose(1, 2)
        return out


def train(arguments: argparse.Namespace) -> None:
    """The training script: nothing in it knows of Fulltilt. Prints the rate of its last seconds."""
    name, small = arguments.train, arguments.small
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    data: Dataset[Any]
    if name == "text":
        data, model = Texts(small), Reader(small)
    else:
        import torchvision

        data = Pictures(arguments.folder, name == "augmented", small)
        model = torchvision.models.resnet18() if small or name == "augmented" else torchvision.models.resnet50()
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch_size = 8 if small else BATCH[name]
    loader = DataLoader(
        data, batch_size=batch_size, shuffle=True, num_workers=arguments.workers, pin_memory=arguments.pin
    )
    began_s = time.perf_counter()
    moments: list[float] = []
    for inputs, target in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=not small):
            loss = nn.functional.cross_entropy(model(inputs.to(device)).float(), target.to(device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if len(moments) % 8 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        moments.append(time.perf_counter() - began_s)
        if moments[-1] > arguments.seconds:
            break
    last = [moment for moment in moments if moment > moments[-1] - arguments.measured_s]
    last = last if len(last) > 1 else moments[-2:]
    by_time = [0] * (int(moments[-1] / 5) + 1)
    for moment in moments:
        by_time[int(moment / 5)] += batch_size
    rate = batch_size * (len(last) - 1) / (last[-1] - last[0])
    print(json.dumps({"rate": rate, "samples_by_5_s": by_time}), flush=True)


def measured(job: str, workers: int, seconds: float, folder: Path, small: bool, *, tuned: bool) -> dict[str, Any]:
    """One run in a process of its own: its rate, and of a tuned one what Fulltilt says."""
    if small:
        seconds /= 4
    script = [__file__, "--train", job, "--workers", str(workers), "--seconds", str(seconds)]
    script += ["--folder", str(folder), "--measured-s", str(MEASURED_S / (4 if small else 1)), *["--small"] * small]
    script += [] if tuned else ["--pin"]
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = ["-m", "fulltilt", "run", "--auto", "--out", str(out), *script] if tuned else script
    limit_s = seconds * 3 + 60
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=limit_s, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rate"')]
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    # Join the rows of wrapped lines; findings and files begin lines.
    whole = re.sub(r"\n +(?! |\d+\. |report: |settings found: )", " ", done.stderr)
    told = [line for line in whole.splitlines() if "--auto" in line or "workers" in line]
    return {**json.loads(lines[-1]), **({"told": told[:4]} if tuned else {})}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="resnet,augmented,text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sweep", help="numbers of workers, such as 0,8,12; default: 0 and each fourth up to the CPUs")
    parser.add_argument("--budget-s", type=float, default=560.0, help="no run begins that would end later")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("auto.json"))
    parser.add_argument("--train", choices=BATCH, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--measured-s", type=float, default=MEASURED_S, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments)
        return 0
    ends_s = time.monotonic() + arguments.budget_s
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    found["machine"] = versions(("torch", "torchvision", "fulltilt"))
    cpus = len(os.sched_getaffinity(0))
    swept = set(map(int, arguments.sweep.split(","))) if arguments.sweep else {0, *range(4, cpus + 1, 4)}
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-auto-", dir=IN_MEMORY))
    try:
        make_images(folder, 64 if arguments.small else 1024, 500, 375, masks=False)
        for job in arguments.jobs.split(","):
            of = found.setdefault(job, {"sweep": {}, "rounds": []})

            def run(workers: int, *, tuned: bool = False, job: str = job) -> dict[str, Any]:
                seconds = TUNED_S if tuned else PLAIN_S
                return measured(job, workers, seconds, folder, arguments.small, tuned=tuned)

            for workers in swept - {int(known) for known in of["sweep"]}:
                of["sweep"][str(workers)] = run(workers)["rate"]
            best = max(of["sweep"], key=of["sweep"].__getitem__)
            for _ in range(arguments.rounds):
                if time.monotonic() + 2 * PLAIN_S + len(STARTS) * (TUNED_S + 12) > ends_s:
                    break
                before = run(int(best))["rate"]
                turns = {str(start): run(start, tuned=True) for start in STARTS}
                of["rounds"].append({"best": statistics.fmean([before, run(int(best))["rate"]]), "tuned": turns})
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(summary(job, of, best), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def summary(job: str, of: dict[str, Any], best: str) -> str:
    """The sweep and what was reached from each start, in a line."""
    sweep = ", ".join(
        f"{workers}: {rate:,.0f}" for workers, rate in sorted(of["sweep"].items(), key=lambda i: int(i[0]))
    )
    reached = []
    for start in map(str, STARTS):
        ratios = sorted(turn["tuned"][start]["rate"] / turn["best"] for turn in of["rounds"])
        if ratios:
            reached.append(f"from {start}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    return f"{job}: samples/s by workers {sweep}; best {best}; reached of it {'; '.join(reached)}"


if __name__ == "__main__":
    sys.exit(main())
