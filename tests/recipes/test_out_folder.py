"""What a training may write in its folder."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fulltilt.cli.main import main
from fulltilt.errors import ForeignFiles
from fulltilt.recipes import RECIPES, out_folder
from fulltilt.recipes.carclip.model import TOKENIZER
from fulltilt.recipes.pretrained import own_tokenizer
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.visobert import VisobertOptions
from fulltilt.train import checkpoint
from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Job


def test_what_a_recipe_was_made_from_is_kept_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FULLTILT_SECRETS", "internal-host")
    settings = TrainSettings(device="cpu", record=False)
    for text_column in ("text", "hf_abcdefghijklmnopqrstuvwx"):
        options = VisobertOptions("https://me:hunter2@hub.example/visobert", text_column, "internal-host")
        data = [torch.ones(2)] * 4
        job = Job(torch.nn.Linear(2, 1), lambda model, batch: model(batch).mean(), data)
        Request(options, settings, tmp_path, tmp_path / "out").train(job)
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    shown = capsys.readouterr().out
    assert "Changed since: text_column text → " in shown
    for secret in ("hunter2", "internal-host", "hf_abcdefgh"):
        assert secret.encode() not in written
        assert secret not in shown
    assert b"https://me:***@hub.example/visobert" in written


# --------------------------------------------------------------------------- what is not ours


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_foreign_out_is_refused_and_left_as_it_is(
    name: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: model and tokenizer in --out were deleted, report.html and metrics.csv replaced."""
    theirs = ["model/config.json", "model.new/a", "tokenizer/tokenizer.json", "report.html", "metrics.csv"]
    for path in theirs:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("mine")
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "synthetic", "--out", ".", *(["--fresh"] if fresh else [])]
    with pytest.raises(SystemExit) as ended:
        main(["train", name, *flags])
    assert ended.value.code == 2
    assert "holds files that Fulltilt did not write: metrics.csv, model, model.new" in capsys.readouterr().err
    found = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert found == sorted(tmp_path / path for path in theirs)
    assert {path.read_text() for path in found} == {"mine"}


def test_library_folder_replaces_only_what_is_ours(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    for text in ("first", "second"):
        with out_folder.written_by_library(target) as private:
            (private / "inner").mkdir()
            (private / "inner" / "weights").write_text(text)
    assert (target / "inner" / "weights").read_text() == "second"
    with pytest.raises(FileNotFoundError), out_folder.written_by_library(target) as private:
        (private / "half").write_bytes((private / "missing").read_bytes())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".fulltilt", "model"]
    (target / "inner" / "notes.txt").write_text("mine")
    with pytest.raises(ForeignFiles, match=r"notes\.txt"), out_folder.written_by_library(target):
        pytest.fail("it was begun")
    assert sorted(path.name for path in (target / "inner").iterdir()) == ["notes.txt", "weights"]


@pytest.mark.parametrize("name", ["visobert", "carclip"])
@pytest.mark.parametrize("theirs", ["tokenizer/tokenizer.json", "tokenizer/notes.txt", "tokenizer"])
def test_fresh_leaves_a_foreign_tokenizer_alone(name: str, theirs: str, tmp_path: Path) -> None:
    """The folder is ours, what lies at the tokenizer's place in it is not."""
    out = checkpoint.claim(tmp_path / "out").path
    if theirs != "tokenizer":
        with out_folder.written_by_library(out / "tokenizer") as private:
            (private / "vocab.json").write_text("ours")
    (out / theirs).write_text("mine")
    special = TOKENIZER if name == "carclip" else {"size": 200, "start": "<s>", "end": "</s>", "pad": "<pad>"}
    request = Request(None, TrainSettings(), tmp_path, out, fresh=True)
    with pytest.raises(ForeignFiles, match="was not written by Fulltilt and is left as it is"):
        own_tokenizer(request, ["a red car"] * 20, **special)
    assert (out / theirs).read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == [".fulltilt", "tokenizer"]


def test_library_folder_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    folder = checkpoint.claim(target.parent)
    killed = folder.make(folder.temporary(target))
    (killed / "half").write_text("x")
    with out_folder.written_by_library(target) as private:
        (private / "weights").write_text("whole")
    assert sorted(path.name for path in target.parent.iterdir()) == [".fulltilt", "model"]


@pytest.mark.parametrize(("name", "flag"), [("visobert", "model"), ("carclip", "model")])
def test_model_given_is_never_the_one_replaced(
    name: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.claim(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "clip"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", name, "--data", "synthetic", f"--{flag}", "./model", "--out", "."])
    assert ended.value.code == 2
    assert "is where this run would put its own model" in capsys.readouterr().err
    assert (tmp_path / "model" / "config.json").read_text() == '{"model_type": "clip"}'


# --------------------------------------------------------------------------- what is not installed


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("cod", "train,recipes"),
        ("carclip", "train,recipes"),
        ("visobert", "train,recipes"),
        ("hdf5", "train,recipes,hdf5"),
    ],
)
@pytest.mark.slow
def test_missing_extra_is_named_with_its_install_line(name: str, extras: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('safetensors', 'numpy', 'PIL', 'timm', 'transformers', 'accelerate', 'h5py', 'yaml'):\n"
        "    sys.modules[name] = None\n"
        "from fulltilt.cli.main import main\n"
        f"main(['train', {name!r}, *sys.argv[1:]])"
    )
    helped, ran = (
        subprocess.run(
            [sys.executable, "-c", script, *flags], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for flags in (["--help"], [])
    )
    assert (helped.returncode, ran.returncode) == (0, 2), helped.stderr + ran.stderr
    assert "Traceback" not in ran.stderr
    assert f'Install: pip install "fulltilt[{extras}]"' in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_calls", [0, 1, 2])
def test_the_model_stays_where_the_disk_is_full(
    kept_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.claim(tmp_path)
    model = tmp_path / "model"
    with out_folder.written_by_library(model) as private:
        (private / "weights").write_text("old")
    plain, calls = Path.replace, iter(range(9))

    def replace(path: Path, target: Path) -> Path:
        if next(calls) == kept_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with contextlib.suppress(OSError), out_folder.written_by_library(model) as private:
        (private / "weights").write_text("new")
    monkeypatch.undo()
    assert (model / "weights").read_text() in ("old", "new")
    with out_folder.written_by_library(model) as private:
        (private / "weights").write_text("newer")
    assert (model / "weights").read_text() == "newer"
    assert not list(tmp_path.glob(".model*"))
