"""The diff of the user's source: a literal in the DataLoader call is changed, all else is told to the user."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fulltilt.errors import MachineError, UsageError
from fulltilt.records import Settings
from fulltilt.tuning.source_edit import (
    OTHER_SHUFFLES,
    SEVERAL_LOADERS,
    CannotEdit,
    ManualChange,
    SourceChange,
    apply_change,
    edit_call,
    fingerprint,
    propose,
)
from fulltilt.tuning.trial.run_trial import recipe_flags
from tests.diagnosis import examples

WANTED = {"num_workers": 8, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4}
BEFORE = {"num_workers": 2, "pin_memory": False, "persistent_workers": False, "prefetch_factor": 2}
MORE = "pin_memory=True, persistent_workers=True, prefetch_factor=4"
MANY_LINES = """loader = DataLoader(
    ds,
    batch_size=8,  # what fits

    num_workers=2,  # why two?
)  # the end
"""


@pytest.mark.parametrize(
    "source",
    [
        "x = torch.utils.data.DataLoader(ds, 8, True, num_workers=2)\n",
        "größe = 'ä', DataLoader(ds, num_workers=2)\n",
        "x = DataLoader(ds, 8,\n               num_workers=2,)\n",
        MANY_LINES,
        "x = 1\n\x0c\ny = DataLoader(ds, num_workers=2)\n",
    ],
    ids=["qualified", "umlauts", "hanging", "many lines", "form feed"],
)
def test_a_literal_is_changed_and_what_is_missing_added(source: str) -> None:
    line = source[: source.index("DataLoader(")].count("\n") + 1
    edited, several = edit_call(source.encode(), line, WANTED, BEFORE)
    assert edited.decode() == source.replace("num_workers=2", f"num_workers=8, {MORE}")
    assert not several


def test_a_written_queue_is_changed_where_it_stands() -> None:
    source = b"x = DataLoader(ds, prefetch_factor=2, num_workers=2)\n"
    expected = b"x = DataLoader(ds, prefetch_factor=4, num_workers=8, pin_memory=True, persistent_workers=True)\n"
    assert edit_call(source, 1, WANTED, BEFORE) == (expected, False)


FLAG = 'parser.add_argument("-j", "--io", type=int, default=2)\n'


@pytest.mark.parametrize(
    ("source", "line", "given", "why"),
    [
        ("loader = DataLoader(ds, num_workers=cfg.workers)\n", 1, (), "num_workers is cfg.workers there, not a number"),
        ("loader = DataLoader(ds, num_workers=args.io)\n" + FLAG, 1, (), "is args.io there, which --io sets on"),
        ("n = 2\nloader = DataLoader(ds, num_workers=n)\n", 2, (), "num_workers is n"),
        ("loader = DataLoader(ds, **options())\n", 1, ("num_workers",), "not followed"),
        ("loader = DataLoader(ds, 8, True, None, None, 2)\n", 1, ("num_workers",), "not followed"),
        ("# coding: latin-1\nloader = DataLoader(ds, num_workers=2)  # f\xfcr\n", 2, (), "does not parse as UTF-8"),
        ("loader = DataLoader(ds, num_workers=5)\n", 1, (), "num_workers is 5 there, but 2 was in force"),
        ("a, b = DataLoader(c, num_workers=2), DataLoader(d, num_workers=2)\n", 1, (), "no single"),
        ("loader = DataLoader((ds))\n", 1, (), "but 2 was in force"),
        ("a = 1\nb = 2\n", 2, (), "no single DataLoader"),
        ("loader = DataLoader(ds,\n", 1, (), "does not parse"),
    ],
)
def test_nothing_is_guessed(source: str, line: int, given: tuple[str, ...], why: str) -> None:
    with pytest.raises(CannotEdit, match=why):
        edit_call(source.encode("latin-1"), line, WANTED, BEFORE, given)


def test_what_would_change_something_else_is_refused() -> None:
    """Behind the last argument stands a parenthesis that `ast` does not show."""
    with pytest.raises(CannotEdit, match="cannot be edited automatically"):
        edit_call(b"x = DataLoader((ds))\n", 1, {"num_workers": 8}, {"num_workers": 0})


def test_what_was_written_since_is_left_as_it_is() -> None:
    source = b"x = DataLoader(ds, num_workers=8)\n"
    assert edit_call(source, 1, {"num_workers": 8}, {"num_workers": 0}) == (source, False)


def test_a_function_that_makes_several_loaders_is_told(tmp_path: Path) -> None:
    twice = "def make(ds):\n    return DataLoader(ds, num_workers=0)\ntrain = make(a)\nval = make(b)\n"
    (tmp_path / "train.py").write_text(twice)
    loader = examples.loader(where="train.py:2", num_workers=0)
    change = propose(loader, Settings(num_workers=4), tmp_path)
    assert isinstance(change, SourceChange)
    assert change.remarks == (SEVERAL_LOADERS,)


# --------------------------------------------------------------------------- the file

IN_FORCE = Settings(num_workers=8, prefetch_factor=2, pin_memory=True, persistent_workers=True, batch_size=64)


def change_of(folder: Path, source: str = "x = DataLoader(ds, batch_size=8)\r\n", **loader: object) -> object:
    (folder / "train.py").write_bytes(source.encode())
    return propose(examples.loader(where="train.py:1", num_workers=0, batch_size=8, **loader), IN_FORCE, folder)


def test_the_diff_is_applied_whole_and_keeps_line_ends_and_mode(tmp_path: Path) -> None:
    change = change_of(tmp_path)
    (tmp_path / "train.py").chmod(0o750)
    assert isinstance(change, SourceChange)
    assert change.diff.startswith("--- a/train.py\n+++ b/train.py\n")
    apply_change(change, fingerprint(tmp_path / "train.py"))
    written = (tmp_path / "train.py").read_bytes()
    assert written.endswith(b"num_workers=8, pin_memory=True, persistent_workers=True)\r\n")
    assert b"batch_size=8," in written  # allowed or not, it was not part of this change
    assert (tmp_path / "train.py").stat().st_mode & 0o777 == 0o750
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_a_link_stays_a_link_and_a_read_only_file_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real.py").write_text("x = DataLoader(ds, batch_size=8)\n")
    (tmp_path / "train.py").symlink_to("real.py")
    change = propose(examples.loader(where="train.py:1", num_workers=0, batch_size=8), IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(MachineError, match="read-only"):
        apply_change(change, None)
    monkeypatch.undo()
    apply_change(change, None)
    assert (tmp_path / "train.py").is_symlink()
    assert "num_workers=8" in (tmp_path / "real.py").read_text()


def test_the_owner_stays_and_a_file_with_two_names_is_refused(tmp_path: Path) -> None:
    change = change_of(tmp_path)
    assert isinstance(change, SourceChange)
    script, other = tmp_path / "train.py", tmp_path / "other.py"
    other.hardlink_to(script)
    with pytest.raises(MachineError, match="other names"):
        apply_change(change, None)
    assert script.read_bytes() == change.old
    other.unlink()
    script.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(script, 1000, 1000)
    with contextlib.suppress(OSError):  # a file system without attributes
        os.setxattr(script, "user.note", b"mine")
    before, noted = script.stat(), os.listxattr(script)
    apply_change(change, None)
    after = script.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert os.listxattr(script) == noted
    assert script.read_bytes() == change.new


def test_a_file_that_changed_since_is_left_alone(tmp_path: Path) -> None:
    change = change_of(tmp_path)
    assert isinstance(change, SourceChange)
    (tmp_path / "train.py").write_text("mine\n")
    with pytest.raises(UsageError, match="changed since"):
        apply_change(change, None)
    assert (tmp_path / "train.py").read_text() == "mine\n"
    (tmp_path / "train.py").write_bytes(change.old)
    with pytest.raises(UsageError, match="changed since"):
        apply_change(change, "another fingerprint")


def test_loaders_that_a_library_makes_are_set_where_it_takes_them(tmp_path: Path) -> None:
    change = change_of(tmp_path, made_by="transformers")
    assert isinstance(change, ManualChange)
    assert change.write == (
        "TrainingArguments(..., dataloader_num_workers=8, dataloader_pin_memory=True, "
        "dataloader_persistent_workers=True)"
    )


LIBRARIES = [
    ("transformers", "a = TrainingArguments('out', dataloader_num_workers=0)\n", "dataloader_num_workers=8, "),
    ("trl", "a = GRPOConfig(output_dir='out')\n", "output_dir='out', dataloader_num_workers=8, "),
    ("skorch", "n = NeuralNetClassifier(M, lr=0.1)\n", "lr=0.1, iterator_train__num_workers=8, "),
    ("timm", "l = create_loader(d, 224, 8, num_workers=0)\n", "num_workers=8, "),
    ("ultralytics", "YOLO('a.yaml').train(data='b.yaml')\n", "data='b.yaml', workers=8)"),
    ("fastai", "d = block.dataloaders(path, bs=8)\n", "bs=8, num_workers=8, pin_memory=True)"),
]


@pytest.mark.parametrize(("library", "source", "written"), LIBRARIES, ids=[library for library, _, _ in LIBRARIES])
def test_the_only_call_of_a_library_gets_its_keywords(library: str, source: str, written: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source + "trainer.run()\n")
    loader = examples.loader(where="train.py:2", num_workers=0, batch_size=8, made_by=library)
    change = propose(loader, IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange)
    assert written in change.new.decode()
    compile(change.new, "train.py", "exec")
    for twice in (source * 2, source.replace(")\n", ", **more)\n")):
        (tmp_path / "train.py").write_text(twice)
        assert isinstance(propose(loader, IN_FORCE, tmp_path), ManualChange)


def test_timm_gets_only_what_create_loader_takes(tmp_path: Path) -> None:
    """It has no prefetch_factor, and a batch size that is already its third argument."""
    (tmp_path / "train.py").write_text("l = create_loader(d, 224, 8, num_workers=0)\n")
    loader = examples.loader(where="train.py:1", num_workers=0, batch_size=8, made_by="timm")
    change = propose(loader, replace(IN_FORCE, prefetch_factor=4), tmp_path)
    assert isinstance(change, SourceChange)
    assert b"num_workers=8" in change.new
    assert b"prefetch_factor" not in change.new
    assert isinstance(propose(loader, replace(IN_FORCE, batch_size=16), tmp_path, with_batch=True), ManualChange)
    (tmp_path / "train.py").write_text("l = create_loader(d, 224, batch_size=8, num_workers=0)\n")
    change = propose(loader, replace(IN_FORCE, batch_size=16), tmp_path, with_batch=True)
    assert isinstance(change, SourceChange)
    assert b"batch_size=16" in change.new


def test_a_loader_that_keeps_its_state_is_edited_as_any(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = StatefulDataLoader(ds, batch_size=8)\n")
    change = propose(examples.loader(where="train.py:1", num_workers=0, batch_size=8), IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange)
    assert b"StatefulDataLoader(ds, batch_size=8, num_workers=8" in change.new


def test_a_script_outside_of_the_working_folder_gets_its_diff(tmp_path: Path) -> None:
    for folder in ("here", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("x = DataLoader(ds, batch_size=8)\n")
    loader = examples.loader(where="train.py:1", num_workers=0, batch_size=8)
    for script, changed in (("../elsewhere/train.py", "elsewhere"), ("train.py", "here")):
        change = propose(loader, IN_FORCE, tmp_path / "here", (script, "--lr", "1"))
        assert isinstance(change, SourceChange), change
        assert change.path.resolve() == tmp_path / changed / "train.py"


def test_what_to_write_by_hand_is_only_what_changes(tmp_path: Path) -> None:
    loader = examples.loader(
        where="gone.py:1", num_workers=2, pin_memory=True, persistent_workers=True, prefetch_factor=4
    )
    change = propose(loader, IN_FORCE, tmp_path)
    assert isinstance(change, ManualChange)
    assert change.write == "DataLoader(…, num_workers=8, prefetch_factor=2)"


def test_workers_of_a_loader_made_for_each_epoch_are_not_told_to_stay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for epoch in range(5):\n    loader = DataLoader(ds, 8)\n")
    loader = examples.loader(where="train.py:2", num_workers=0, batch_size=8, constructed=5, passes=5)
    change = propose(loader, IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange)
    assert "num_workers" in change.diff
    assert "persistent_workers" not in change.diff
    assert change.remarks[-1].startswith("the loader is made again for each epoch")


def test_a_flag_of_the_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = DataLoader(ds, num_workers=args.num_workers)\n")
    loader = examples.loader(where="train.py:1", num_workers=0)
    change = propose(loader, IN_FORCE, tmp_path, ("train.py", "--num-workers", "0"))
    assert change == ManualChange("--num-workers is given on the command line", "--num-workers 8")


def test_the_batch_size_is_written_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = DataLoader(ds, batch_size=8)\n")
    loader = examples.loader(where="train.py:1", num_workers=0, batch_size=8)
    change = propose(loader, IN_FORCE, tmp_path, with_batch=True)
    assert isinstance(change, SourceChange)
    assert b"batch_size=64" in change.new


def test_a_recipe_is_told_by_its_flags(tmp_path: Path) -> None:
    loader = examples.loader(where=None, made_by="fulltilt")
    assert propose(loader, IN_FORCE, tmp_path) == ManualChange(
        "Fulltilt makes the loader from its settings", "--workers 8"
    )
    assert recipe_flags(Settings(num_workers=4, batch_size=16, accumulation=2, compile=True)) == (
        ["--workers", "4", "--batch-size", "16", "--accumulation", "2", "--compile"]
    )


def test_persistent_workers_are_told_to_change_later_shuffles(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("loader = DataLoader(ds, shuffle=True)\n")
    in_force = Settings(num_workers=4, persistent_workers=True)
    for shuffle, told in ((True, (OTHER_SHUFFLES,)), (False, ())):
        change = propose(examples.loader(where="train.py:1", shuffle=shuffle), in_force, tmp_path)
        assert isinstance(change, SourceChange)
        assert change.remarks == told


def test_persistent_workers_do_change_later_shuffles() -> None:
    """As torch has it today; if it ever seeds them again, the remark is to go."""

    def orders(**more: bool) -> list[list[int]]:
        torch.manual_seed(0)
        loader = DataLoader(range(50), shuffle=True, batch_size=None, num_workers=1, **more)  # type: ignore[arg-type, call-overload, var-annotated]
        return [list(loader) for _ in range(2)]

    plain, persistent = orders(), orders(persistent_workers=True)
    assert plain[0] == persistent[0]
    assert plain[1] != persistent[1]
