"""The engine against a hand-written loop of the same model, and what each of its features costs or wins.

    python bench/engine.py [--out engine.json] [--smoke]

Blocks of the two loops alternate in one process, so that clocks and temperature treat both alike. ``--smoke`` runs
everything with tiny sizes on the CPU, to see that it works; its figures mean nothing. Takes under 150 s on an H200.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from children import IN_MEMORY, versions
from feedbench.measuring import plain_step
from torch import nn

from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen

BUDGET_S = 140.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = inputs + self.layers(inputs)
        return out


def network(widths: tuple[int, ...], depth: int) -> nn.Module:
    """A small residual network: convolutions, norms and matrix products, as image jobs have them."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 7, stride=4, padding=3)]
    for before, width in zip((widths[0], *widths), widths, strict=False):
        if before != width:
            layers.append(nn.Conv2d(before, width, 2, stride=2))
        layers += [Block(width) for _ in range(depth)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)]
    return nn.Sequential(*layers)


class Sizes:
    """What is run: small for the smoke test, a 30 ms step otherwise."""

    def __init__(self, smoke: bool, device: torch.device) -> None:
        self.device = device
        self.widths = (16, 32) if smoke else (128, 256, 512)
        self.depth = 1 if smoke else 3
        self.batch = 4 if smoke else 128
        self.pixels = 16 if smoke else 192
        self.warmup = 2 if smoke else 12
        self.steps = 4 if smoke else 40
        self.pairs = 1 if smoke else 5
        self.save_every = 3 if smoke else 50

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return network(self.widths, self.depth).to(self.device)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator(self.device).manual_seed(1)
        size = (self.batch, 3, self.pixels, self.pixels)
        return [
            (
                torch.randn(size, device=self.device, generator=generator),
                torch.randint(0, 1000, size[:1], device=self.device, generator=generator),
            )
            for _ in range(4)
        ]


class Clocked:
    """Batches that note the time at which batch ``first`` and batch ``last`` are drawn."""

    def __init__(self, batches: list[Any], first: int, last: int) -> None:
        self.batches, self.first, self.last = batches, first, last
        self.began_s = self.ended_s = 0.0
        self.began_cpu_s = self.ended_cpu_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.last + 1):
            if number == self.first:
                self.began_s, self.began_cpu_s = now_s(), time.process_time()
            if number == self.last:
                self.ended_s, self.ended_cpu_s = now_s(), time.process_time()
            yield self.batches[number % len(self.batches)]

    @property
    def step_s(self) -> float:
        return (self.ended_s - self.began_s) / (self.last - self.first)

    @property
    def step_cpu_s(self) -> float:
        """CPU time of all threads per step, which other jobs do not change."""
        return (self.ended_cpu_s - self.began_cpu_s) / (self.last - self.first)


def now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_hand(sizes: Sizes, model: nn.Module, clip: float | None) -> float:
    """Seconds a step of the shortest loop that trains the same."""
    step = plain_step(model, loss, clip_norm=clip)
    data = Clocked(sizes.batches(), sizes.warmup, sizes.warmup + sizes.steps)
    for batch in data:
        step(batch)
    return data.step_s


def by_engine(
    sizes: Sizes, model: nn.Module, out: Path, steps: int | None = None, first: int | None = None, **settings: Any
) -> Clocked:
    """The engine, all of its guards on, clocked over ``steps`` steps from ``first`` on."""
    begin = first or sizes.warmup
    data = Clocked(sizes.batches(), begin, begin + (steps or sizes.steps))
    chosen = {"lr": 1e-4, "schedule": "constant", "precision": "bf16", "max_steps": data.last + 1, **settings}
    shutil.rmtree(out, ignore_errors=True)
    job, screen = Job(model=model, loss=loss, data=data), TrainingScreen(out, speaks=False)
    train(job, TrainSettings(device=sizes.device.type, **chosen), out, screen=screen)  # type: ignore[arg-type]
    return data


def compare_loops(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The engine's speed as a share of the hand-written loop's: median over alternating pairs, with their range."""
    answer: dict[str, Any] = {}
    for name, clip in (("plain", None), ("with clipping", 1.0)):
        model = sizes.model()
        ratios, hand, engine = [], [], []
        for pair in range(sizes.pairs):
            for handwritten in (True, False) if pair % 2 == 0 else (False, True):
                if handwritten:
                    hand.append(by_hand(sizes, model, clip))
                else:
                    engine.append(by_engine(sizes, model, out, clip_norm=clip).step_s)
            ratios.append(hand[-1] / engine[-1])
        answer[name] = {
            "hand_ms": 1e3 * statistics.median(hand),
            "engine_ms": 1e3 * statistics.median(engine),
            "engine_share_of_hand_speed": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
        }
    return answer


def checkpoint_cost(sizes: Sizes, out: Path) -> dict[str, Any]:
    """What a background checkpoint every ``save_every`` steps costs, in percent of the step.

    The clock starts after the first save, which also pins the host memory that all later ones use again.
    """
    steps, first = 2 * sizes.save_every, sizes.save_every + 2
    plain, saving = [], []
    for _ in range(2):
        often = {"save_every": sizes.save_every, "keep_last": 1}
        plain.append(by_engine(sizes, sizes.model(), out, steps, first).step_s)
        saving.append(by_engine(sizes, sizes.model(), out, steps, first, **often).step_s)
    size = sum(p.nbytes for p in sizes.model().parameters()) * 3
    return {
        "save_every_steps": sizes.save_every,
        "about_bytes": size,
        "plain_ms": 1e3 * min(plain),
        "saving_ms": 1e3 * min(saving),
        "cost_pct": 100.0 * (min(saving) / min(plain) - 1.0),
    }


def recording_cost(sizes: Sizes, out: Path, steps: int) -> dict[str, Any]:
    """What the record of a run costs, in percent of the step: neighbouring blocks with and without it, in pairs."""
    model = sizes.model()
    precision = "bf16" if sizes.device.type == "cuda" else "fp32"  # many CPUs only imitate bf16
    plain, recorded = list[tuple[float, float]](), list[tuple[float, float]]()
    for pair in range(2 * sizes.pairs):
        for record in (False, True) if pair % 2 == 0 else (True, False):
            timed = by_engine(sizes, model, out, steps, record=record, precision=precision)
            (recorded if record else plain).append((timed.step_s, timed.step_cpu_s))
    pairs = list(zip(plain, recorded, strict=True))
    costs = sorted(100.0 * (b[0] / a[0] - 1.0) for a, b in pairs)
    return {
        "steps": steps,
        "plain_ms": 1e3 * statistics.median(wall_s for wall_s, _ in plain),
        "recorded_ms": 1e3 * statistics.median(wall_s for wall_s, _ in recorded),
        "cost_pct": statistics.median(costs),
        "middle_half_pct": [costs[len(costs) // 4], costs[-1 - len(costs) // 4]],
        "cpu_cost_pct": statistics.median(100.0 * (b[1] / a[1] - 1.0) for a, b in pairs),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "tf32": False},
    "tf32": {"precision": "fp32", "tf32": True},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "bf16, channels-last": {"precision": "bf16", "channels_last": True},
    "bf16, channels-last, compiled": {"precision": "bf16", "channels_last": True, "compile": True},
}


def compare_variants(sizes: Sizes, out: Path, deadline_s: float) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name, settings in VARIANTS.items():
        too_slow = settings.get("compile") and sizes.device.type != "cuda"
        if time.monotonic() > deadline_s or too_slow:
            answer[name] = None
            continue
        steps = max(sizes.steps // (4 if name == "fp32" else 2), 2)
        try:
            step_s = by_engine(sizes, sizes.model(), out, steps, **settings).step_s
        except Exception as error:  # a variant that this machine lacks must not end the others
            answer[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
            continue
        answer[name] = {"step_ms": 1e3 * step_s, "samples_per_s": sizes.batch / step_s}
    return answer


def loop_rows(loops: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, found in loops.items():
        low, high = found["range"]
        share = found["engine_share_of_hand_speed"]
        yield (
            f"engine / hand-written loop, {name}",
            f"{share:.4f} ({low:.4f} to {high:.4f}); {found['engine_ms']:.2f} against {found['hand_ms']:.2f} ms",
        )


def checkpoint_rows(saving: dict[str, Any]) -> Iterator[tuple[str, str]]:
    every, size = saving["save_every_steps"], saving["about_bytes"] / 2**20
    yield f"background checkpoints of {size:.0f} MiB every {every} steps", f"{saving['cost_pct']:+.2f} %"


def variant_rows(variants: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, found in variants.items():
        if found is None:
            shown = "left out: no time"
        elif "error" in found:
            shown = found["error"]
        else:
            shown = f"{found['step_ms']:.2f} ms, {found['samples_per_s']:.0f} samples/s"
        yield name, shown


def recording_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, one in found.items():
        low, high = one["middle_half_pct"]
        wall = f"{one['cost_pct']:+.2f} % ({low:+.2f} to {high:+.2f}) of {one['plain_ms']:.2f} ms"
        shown = f"{wall}; {one['cpu_cost_pct']:+.2f} % of all threads' CPU time"
        yield f"the run's record, {name}", shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU if there is no GPU")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("this measures a GPU; use --smoke to see that it works")
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not arguments.smoke else torch.device("cpu")
    sizes = Sizes(arguments.smoke, device)
    began_s = time.monotonic()
    # Checkpoints of the compared loops go to memory, not to a disk; their cost is measured separately.
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as quick, tempfile.TemporaryDirectory() as disk:
        run = Path(quick) / "run"
        parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Iterator[tuple[str, str]]]]] = {
            "loops": (lambda: compare_loops(sizes, run), loop_rows),
            "checkpoints": (lambda: checkpoint_cost(sizes, Path(disk) / "run"), checkpoint_rows),
            "recording": (lambda: {"30 ms steps": recording_cost(sizes, run, sizes.steps)}, recording_rows),
            "variants": (lambda: compare_variants(sizes, run, began_s + BUDGET_S - 45.0), variant_rows),
        }
        results: dict[str, Any] = {"versions": versions(("torch",)), "device": str(device)}
        for part, (measure, shown_as) in parts.items():
            try:
                results[part] = measure()
                lines = list(shown_as(results[part]))
            except Exception as error:  # time on a GPU is short: the other parts still count
                results[part] = {"error": f"{type(error).__name__}: {error}"}
                lines = [(part, results[part]["error"])]
            for name, shown in lines:
                print(f"{name:<58} {shown}", flush=True)
            results["seconds"] = time.monotonic() - began_s
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{results['seconds']:.0f} s; written to {arguments.out}")


if __name__ == "__main__":
    main()
