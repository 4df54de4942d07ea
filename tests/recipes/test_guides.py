"""Every command line that the launchers in guides/ stand for: only paths and numbers of epochs are exchanged.

A fast test reads each line through its launcher up to the moment of training; a slow one (``make test-recipes``) runs
it and looks for the lines that users know from there.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.recipes.synthetic import make_folder

GUIDES = Path(__file__).parents[2] / "guides"

# What every training shows; its lines about GPUs are looked for in tests/gpu.
STATUS = r"GPU: (n/a|\d+%) \| VRAM:(n/a|[\d.]+/[\d.]+GB\([\d.]+%\)) \| CPU: [\d.]+% \| RAM:[\d.]+/[\d.]+GB\([\d.]+%\)"
EPOCH = r"Epoch time: \d+s \([\d.]+ samples/sec, [\d.]+ batches/sec\)"
SEEN = (STATUS, EPOCH, r"Epoch 1/\d+ \[█")


@dataclass(frozen=True)
class Line:
    """A command line. ``says`` are expressions that its output must match, besides those of every training.

    ``config`` is what stands in its YAML file.
    """

    command: str
    kind: str
    says: tuple[str, ...] = ()
    config: str = ""


def cod(options: str, *, batch: int) -> Line:
    command = f"""python train_ultimate.py train
        --dataset-path /kaggle/input/cod10k-dataset/COD10K-v3 --checkpoint-dir /kaggle/working/checkpoints
        --resume-from /kaggle/working/checkpoints/best_model.pth --skip-stage1 --backbone edgenext_base
        --num-experts 7 {options}"""
    return Line(command, "cod", (re.escape(f"Batch size: {batch} (expected: {batch})"),))


def cars(command: str, *, batch: int, parts: int = 1) -> Line:
    compared = (rf"A step compares {batch * parts} pictures with {batch * parts} captions",) if parts > 1 else ()
    wanted = (rf"Using batch size: {batch} \(", rf"Batch size: {batch} \(expected: {batch}\)", *compared)
    return Line(command, "cars", wanted)


def text(config: str = "", *, batch: int = 96) -> Line:
    wanted = (rf"Batch size: {batch} \(expected: {batch}\)", "No GPU here: fp16 switched off", "eval_macro_f1")
    return Line("python train.py", "text", wanted, textwrap.dedent(config))


def windows(command: str, *says: str) -> Line:
    wanted = (r"Batch size: 8192 \(expected: 8192\)", "eval_auroc", "Final - ", "Peak - ")
    return Line(command, "hdf5", (*wanted, *says))


TAIL = "--scheduler cosine --min-lr 0.00001 --progressive-unfreeze --deep-supervision"
TAIL_3 = "--scheduler cosine --min-lr 0.00001 --warmup-epochs 10 --progressive-unfreeze --deep-supervision"
LINES = {
    "cod, solution 1": cod(
        "--batch-size 8 --stage2-batch-size 8 --accumulation-steps 1 --img-size 384 --epochs 120 --stage1-epochs 30"
        f" --lr 0.0004 --stage2-lr 0.00024 {TAIL} --num-workers 12 --num-workers 12",
        batch=8,
    ),
    "cod, solution 2": cod(
        "--batch-size 12 --stage2-batch-size 12 --accumulation-steps 1 --img-size 384 --epochs 120 --stage1-epochs 30"
        f" --lr 0.00048 --stage2-lr 0.00027 {TAIL} --num-workers 12 --num-workers 12",
        batch=12,
    ),
    "cod, solution 3": cod(
        "--batch-size 16 --stage2-batch-size 16 --accumulation-steps 1 --img-size 384 --epochs 120 --stage1-epochs 30"
        " --lr 0.0006 --stage2-lr 0.00030 --scheduler cosine --min-lr 0.00002 --warmup-epochs 3"
        " --progressive-unfreeze --deep-supervision --num-workers 16 --num-workers 16",
        batch=16,
    ),
    "cod, quick start": cod(
        "--batch-size 8 --stage2-batch-size 8 --accumulation-steps 1 --img-size 384 --epochs 120 --stage1-epochs 30"
        f" --lr 0.0004 --stage2-lr 0.00024 {TAIL} --num-workers 12",
        batch=8,
    ),
    "cod, two GPUs": cod(
        "--batch-size 32 --stage2-batch-size 16 --accumulation-steps 1 --img-size 320 --epochs 140 --stage1-epochs 30"
        f" --lr 0.00065 --stage2-lr 0.00015 {TAIL_3} --num-workers 16",
        batch=16,
    ),
    "cod, option A": cod(
        "--batch-size 16 --stage2-batch-size 12 --accumulation-steps 1 --img-size 320 --epochs 140 --stage1-epochs 30"
        f" --lr 0.00065 --stage2-lr 0.00015 {TAIL_3} --num-workers 12",
        batch=12,
    ),
    "cod, option B": cod(
        "--batch-size 16 --stage2-batch-size 8 --accumulation-steps 1 --img-size 352 --epochs 140 --stage1-epochs 30"
        f" --lr 0.00065 --stage2-lr 0.00015 {TAIL_3} --num-workers 12",
        batch=8,
    ),
    "carclip, 8 GB": cars(
        "python scripts/train_car_clip.py --batch_size 128 --gradient_accumulation 2 --num_workers 12 --epochs 20"
        " --lr 2e-5",
        batch=128,
        parts=2,
    ),
    "carclip, 12 GB and more": cars(
        "python scripts/train_car_clip.py --batch_size 256 --gradient_accumulation 2 --num_workers 16 --epochs 20"
        " --lr 2e-5",
        batch=256,
        parts=2,
    ),
    "carclip, accumulation": cars(
        "python train_car_clip.py --batch_size 64 --gradient_accumulation 2", batch=64, parts=2
    ),
    "carclip, more accumulation": cars(
        "python scripts/train_car_clip.py --batch_size 128 --gradient_accumulation 4", batch=128, parts=4
    ),
    "carclip, out of memory": cars("python scripts/train_car_clip.py --batch_size 64", batch=64),
    "carclip, full precision": cars("python scripts/train_car_clip.py --no_mixed_precision", batch=96),
    "visobert": text(),
    "visobert, if out of memory": text(
        """
        per_device_train_batch_size: 80
        per_device_eval_batch_size: 160
        gradient_checkpointing: true  # Trades speed for memory
        fp16: true
        tf32: true
        optim: adamw_bnb_8bit
        """,
        batch=80,
    ),
    "visobert, if below 95 %": text(
        """
        per_device_train_batch_size: 96
        per_device_eval_batch_size: 192
        dataloader_num_workers: 4  # instead of 2
        dataloader_prefetch_factor: 6  # instead of 4
        # Sometimes non-persistent is faster
        dataloader_persistent_workers: false
        gradient_accumulation_steps: 1
        fp16: true
        tf32: true
        """
    ),
    "hdf5": windows("python train_binary.py"),
    "hdf5, loader profile": windows(
        "TRAINER_LOG_LEVEL=DEBUG python train_binary.py", r"\[TRAIN PROFILE\] DataLoader avg: [\d.]+ms, max: [\d.]+ms"
    ),
}

# --------------------------------------------------------------------------- exchanging paths and epochs


@dataclass(frozen=True)
class Places:
    data: Path
    out: Path
    weights: Path


def exchanged(line: Line, places: Places) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of a line, with our paths, and as few epochs as a test can wait for."""
    text = " ".join(line.command.split())
    text = re.sub(r"/kaggle/input/\S+", str(places.data), text)
    text = re.sub(r"(--resume-from )/\S+", rf"\g<1>{places.weights}", text)
    text = re.sub(r"/kaggle/working/\S+", str(places.out), text)
    if line.kind != "cod":  # the others name no path, and train for many epochs by default
        text += f" --data {places.data} --out {places.out}" + (" --epochs 20" if "--epochs" not in text else "")
    if line.config:
        file = places.out.with_name("config.yaml")
        file.write_text(line.config)
        text += f" --config {file}"
    text = re.sub(r"(--epochs) \d+", r"\1 2", text)
    text = re.sub(r"(--(?:stage1|warmup)-epochs) \d+", r"\1 1", text)
    words = shlex.split(text)
    environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return environment, [word for word in words if word.partition("=")[0] not in environment]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small data set of each kind."""
    folder = tmp_path_factory.mktemp("made")
    # One whole step of the largest batch that a line trains with: sixteen of twenty, 512 of 544, …
    # Texts for more than a second of training on a fast machine: before that nobody knows how busy its CPU is.
    sizes = {"cod": 25, "cars": 640, "text": 900, "hdf5": 10_300}
    for kind, size in sizes.items():
        make_folder(kind, folder / kind, size, 0)
    return {kind: folder / kind for kind in sizes}


# --------------------------------------------------------------------------- read, fast


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.kind == "cod"])
@pytest.mark.slow
def test_a_cod_line_means_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fulltilt.recipes import cod as package

    seen: list[Any] = []
    recipe = replace(package.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(package, "RECIPE", recipe)
    line, places = LINES[name], Places(tmp_path / "data", tmp_path / "out", tmp_path / "best_model.pth")
    _, words = exchanged(line, places)
    flags = dict(zip(words[3:], [*words[4:], ""], strict=True))
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GUIDES / words[1]), run_name="__main__")
    assert ended.value.code == 0
    (request,) = seen
    settings, options = request.settings, request.options
    assert (request.data, request.out, request.resume_from) == (places.data, places.out, places.weights)
    assert (settings.batch_size, settings.workers) == (int(flags["--batch-size"]), int(flags["--num-workers"]))
    assert (settings.lr, settings.min_lr) == (float(flags["--lr"]), float(flags["--min-lr"]))
    assert (settings.schedule, settings.accumulation, settings.epochs) == ("cosine", 1, 2)
    assert (options.stage2_lr, options.stage2_batch_size) == (
        float(flags["--stage2-lr"]),
        int(flags["--stage2-batch-size"]),
    )
    assert (options.img_size, options.num_experts) == (int(flags["--img-size"]), 7)
    assert (options.skip_stage1, options.progressive_unfreeze, options.deep_supervision) == (True, True, True)


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.kind == "cars"])
def test_a_carclip_line_means_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fulltilt.recipes import carclip as package

    seen: list[Any] = []
    recipe = replace(package.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(package, "RECIPE", recipe)
    places = Places(tmp_path, tmp_path / "out", tmp_path)
    _, words = exchanged(LINES[name], places)
    flags = dict(zip(words[2:], [*words[3:], ""], strict=True))
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(home(words[1]) / words[1]), run_name="__main__")
    assert ended.value.code == 0
    settings = seen[0].settings
    assert settings.batch_size == int(flags.get("--batch_size", 96))
    assert settings.accumulation == int(flags.get("--gradient_accumulation", 1))
    assert settings.workers == int(flags.get("--num_workers", 8))
    assert (settings.lr, settings.epochs) == (2e-5, 2)
    assert settings.precision == ("fp32" if "--no_mixed_precision" in flags else "auto")


@pytest.mark.parametrize(
    ("flags", "rank", "told"),
    [
        (["--batch_size", "128"], 0, "Using batch size: 128 (from command line)\n"),
        (["--batch-size=128"], 0, "Using batch size: 128 (from command line)\n"),
        ([], 0, "Using batch size: 96 (default)\n"),
        (["--batch_size", "128"], 1, ""),
        (["--batch_size", "many"], 0, ""),
        (["--batch_size"], 0, ""),
        (["--batch_size", "128", "--no_such_flag"], 0, ""),
    ],
)
def test_batch_size_is_said_once_and_of_no_refused_line(
    flags: list[str],
    rank: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fulltilt.recipes import carclip as package

    monkeypatch.setattr(package, "RECIPE", replace(package.RECIPE, check=lambda request: None, run=lambda request: {}))
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["t", f"--data={tmp_path}", f"--out={tmp_path / 'o'}", *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GUIDES / "scripts" / "train_car_clip.py"), run_name="__main__")
    assert ended.value.code == (0 if told or rank else 2)
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.kind == "text"])
def test_a_visobert_config_means_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fulltilt.recipes import visobert as package

    seen: list[Any] = []
    recipe = replace(package.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(package, "RECIPE", recipe)
    _, words = exchanged(LINES[name], Places(tmp_path, tmp_path / "out", tmp_path))
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GUIDES / words[1]), run_name="__main__")
    assert ended.value.code == 0
    settings = seen[0].settings
    assert (settings.precision, settings.tf32, settings.accumulation) == ("fp16", True, 1)
    assert settings.eval_batch_size == 2 * settings.batch_size
    known = (settings.batch_size, settings.workers, settings.prefetch, settings.gradient_checkpointing)
    assert (*known, settings.optimizer) == {
        "visobert": (96, 2, 4, False, "adamw"),
        "visobert, if out of memory": (80, 2, 4, True, "adamw8bit"),
        "visobert, if below 95 %": (96, 4, 6, False, "adamw"),
    }[name]


@pytest.mark.parametrize("flags", [(), ("--batch-size", "10240")], ids=["as it is", "with a flag"])
def test_the_hdf5_config_object_reaches_the_recipe(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fulltilt.recipes import hdf5 as package

    seen: list[Any] = []
    recipe = replace(package.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(package, "RECIPE", recipe)
    _, words = exchanged(LINES["hdf5"], Places(tmp_path, tmp_path / "out", tmp_path))
    monkeypatch.setattr(sys, "argv", [*words[1:], *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GUIDES / words[1]), run_name="__main__")
    assert ended.value.code == 0
    settings = seen[0].settings
    assert settings.batch_size == (10240 if flags else 8192)
    assert (settings.eval_batch_size, settings.workers, settings.prefetch) == (4096, 8, 16)


def test_cod_switches_are_off_without_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fulltilt.recipes import cod as package

    seen: list[Any] = []
    recipe = replace(package.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(package, "RECIPE", recipe)
    monkeypatch.setattr(sys, "argv", ["t", "train", f"--dataset-path={tmp_path}", f"--checkpoint-dir={tmp_path}/o"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(GUIDES / "train_ultimate.py"), run_name="__main__")
    options = seen[0].options
    assert (options.skip_stage1, options.progressive_unfreeze, options.deep_supervision) == (False, False, False)


@pytest.mark.parametrize(
    ("launcher", "package", "config"),
    [
        (("train_ultimate.py", "train"), "cod", {"deep_supervision": True, "progressive_unfreeze": True}),
        (("scripts/train_car_clip.py",), "carclip", {"batch_size": 24, "lr": 0.001, "workers": 0}),
    ],
    ids=["cod", "carclip"],
)
def test_a_config_file_wins_over_the_launchers_defaults(
    launcher: tuple[str, ...], package: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, seen = importlib.import_module(f"fulltilt.recipes.{package}"), []
    recipe = replace(module.RECIPE, check=lambda request: None, run=lambda request: seen.append(request) or {})
    monkeypatch.setattr(module, "RECIPE", recipe)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", [*launcher, f"--config={file}", f"--data={tmp_path}", f"--out={tmp_path / 'o'}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(GUIDES / launcher[0]), run_name="__main__")
    assert ended.value.code == 0
    (request,) = seen
    assert {key: getattr(request.options, key, getattr(request.settings, key, None)) for key in config} == config


# --------------------------------------------------------------------------- run, slow


@pytest.mark.slow
@pytest.mark.recipes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LINES)
def test_a_line_runs_and_prints_what_users_know(name: str, made: dict[str, Path], tmp_path: Path) -> None:
    line = LINES[name]
    places = Places(made[line.kind], tmp_path / "out", tmp_path / "best_model.pth")
    if "--resume-from" in line.command:
        torch.save({"epoch": 84, "model_state_dict": foreign_weights(line)}, places.weights)
    environment, words = exchanged(line, places)
    ran = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=home(words[1]),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ran.stdout + ran.stderr
    assert ran.returncode == 0, shown
    assert "Traceback" not in shown
    for wanted in (*SEEN, *line.says):
        assert re.search(wanted, shown), f"{wanted}\n{shown}"


def home(script: str) -> Path:
    """The folder that a script is called from."""
    return GUIDES if (GUIDES / script).exists() else GUIDES / "scripts"


def foreign_weights(line: Line) -> dict[str, torch.Tensor]:
    """The weights of such a model, as DataParallel names them."""
    from fulltilt.recipes.cod import model

    return {f"module.{name}": tensor for name, tensor in model.build("edgenext_base", 384).state_dict().items()}
