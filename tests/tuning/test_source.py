"""The diff of the user's source: differently written calls, each changed rightly or refused with what to write."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fulltilt.errors import MachineError, UsageError
from fulltilt.records import Settings
from fulltilt.tuning.processes import recipe_flags
from fulltilt.tuning.source_call import Refused, Rewritten, rewrite_call
from fulltilt.tuning.source_patch import SourceChange, WriteYourself, apply_change, fingerprint, propose
from tests.diagnosis import examples

WANTED = {"num_workers": 8, "pin_memory": True, "persistent_workers": True, "prefetch_factor": 4}
BEFORE = {"num_workers": 2, "pin_memory": False, "persistent_workers": False, "prefetch_factor": 2}

KWARGS_DICT = """kw = {'num_workers': 2, 'shuffle': True}
loader = DataLoader(ds, batch_size=8, **kw)
"""
IN_A_FUNCTION = """def make(ds, train, workers=2):
    return DataLoader(ds, 8, train, num_workers=workers)


train, val = make(a, True), make(b, False, workers=0)
"""
POSITIONAL = """loader = torch.utils.data.DataLoader(ds, 8, True, None, None, 2, collate)
"""
MANY_LINES = """loader = DataLoader(
    ds,
    batch_size=8,  # what fits
    shuffle=True,

    # two were enough once
    num_workers=2,  # why two?
)  # the end
"""
CONFIG = """@dataclass
class Config:
    num_workers: int = 2  # of the loader
    batch: int = 8


cfg = Config()
loader = DataLoader(ds, batch_size=cfg.batch, num_workers=cfg.num_workers, shuffle=True)
"""
NO_TRAILING_COMMA = """loader = DataLoader(
    ds,
    num_workers=2  # why two?
)
"""
HANGING = """loader = DataLoader(ds, batch_size=8,
                    num_workers=2)
"""
ARGPARSE = """parser.add_argument("--num-workers", type=int, default=2)
args = parser.parse_args()
loader = DataLoader(ds, num_workers=args.num_workers)
"""
SHARED_DICT = """kw = dict(
    num_workers=2,
    shuffle=True,
)
train = DataLoader(a, **kw)
val = DataLoader(b, **kw)
"""

MORE = "pin_memory=True, persistent_workers=True, prefetch_factor=4"


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        (
            KWARGS_DICT,
            2,
            KWARGS_DICT.replace(
                "2, 'shuffle': True",
                "8, 'shuffle': True, 'pin_memory': True, 'persistent_workers': True, 'prefetch_factor': 4",
            ),
        ),
        (
            IN_A_FUNCTION,
            2,
            # The validation loader has no workers, which torch will neither keep nor prefetch for.
            IN_A_FUNCTION.replace("workers=2", "workers=8").replace(
                "num_workers=workers)",
                "num_workers=workers, pin_memory=True, persistent_workers=workers > 0,"
                " prefetch_factor=4 if workers > 0 else None)",
            ),
        ),
        (POSITIONAL, 1, POSITIONAL.replace("None, 2, collate)", f"None, 8, collate, {MORE})")),
        (
            MANY_LINES,
            1,
            MANY_LINES.replace(
                "=2,  # why two?\n",
                "=8,  # why two?\n    pin_memory=True,\n    persistent_workers=True,\n    prefetch_factor=4,\n",
            ),
        ),
        (
            CONFIG,
            8,
            CONFIG.replace("int = 2", "int = 8").replace(
                "shuffle=True)",
                "shuffle=True, pin_memory=True, persistent_workers=cfg.num_workers > 0,"
                " prefetch_factor=4 if cfg.num_workers > 0 else None)",
            ),
        ),
        (
            NO_TRAILING_COMMA,
            1,
            NO_TRAILING_COMMA.replace(
                "=2  # why two?\n",
                "=8,  # why two?\n    pin_memory=True,\n    persistent_workers=True,\n    prefetch_factor=4\n",
            ),
        ),
        (
            HANGING,
            1,
            HANGING.replace("=2)", f"=8,\n{MORE})".replace(", ", ",\n").replace("\n", "\n" + 20 * " ")),
        ),
    ],
    ids=["kwargs dict", "in a function", "positional", "many lines", "config", "no trailing comma", "hanging"],
)
def test_the_call_is_changed_where_its_values_are_written(source: str, line: int, expected: str) -> None:
    result = rewrite_call(source, line, WANTED, BEFORE)
    assert isinstance(result, Rewritten), result
    assert result.source == expected
    ast.parse(result.source)


def test_what_else_is_concerned_is_said() -> None:
    default = rewrite_call(ARGPARSE, 3, WANTED, BEFORE)
    assert isinstance(default, Rewritten)
    assert "default=8" in default.source
    assert "command line still wins" in default.remarks[0]
    shared = rewrite_call(SHARED_DICT, 5, WANTED, BEFORE)
    assert isinstance(shared, Rewritten)
    assert shared.remarks == ("the change also reaches the loader made in line 6",)


@pytest.mark.parametrize(
    ("source", "line", "why"),
    [
        ("from conf import cfg\nloader = DataLoader(ds, num_workers=cfg.workers)\n", 2, "num_workers is cfg.workers"),
        ("loader = DataLoader(ds, **options())\n", 1, "not a dict written in this file"),
        ("loader = DataLoader(ds, num_workers=min(2, os.cpu_count()))\n", 1, "num_workers is min"),
        ("a = 1\nb = 2\n", 2, "no DataLoader"),
        ("loader = DataLoader(ds,\n", 1, "does not parse"),
        ("n = 2\nn = 2\nloader = DataLoader(ds, num_workers=n)\n", 3, "num_workers is n"),
        # What is written is not what ran, so it is not known where the value came from.
        ("n = 5\nloader = DataLoader(ds, num_workers=n)\n", 2, "num_workers is n"),
    ],
)
def test_nothing_is_guessed(source: str, line: int, why: str) -> None:
    result = rewrite_call(source, line, WANTED, BEFORE)
    assert isinstance(result, Refused)
    assert why in result.why


NONE_YET = {"num_workers": 0, "pin_memory": False, "persistent_workers": False}
EIGHT = {"num_workers": 8}


@pytest.mark.parametrize(
    ("source", "line", "changed"),
    [
        ("from torch.utils.data import DataLoader as dl\nx = dl(ds)\n", 2, "dl(ds, num_workers=8)"),
        (
            "cfg = SimpleNamespace(num_workers=0)\nx = DataLoader(ds, num_workers=cfg.num_workers)\n",
            2,
            "(num_workers=8)",
        ),
        ("bs, n = 8, 0\nx = DataLoader(ds, bs, num_workers=n)\n", 2, "bs, n = 8, 8"),
        (
            "class C:\n    n: int = field(default=0)\ndef go(c):\n    DataLoader(ds, num_workers=c.n)\ngo(C())\n",
            4,
            "=8)",
        ),
        ("kw = {'a': 1}\nkw['num_workers'] = 0\nx = DataLoader(ds, **kw)\n", 3, "kw['num_workers'] = 8"),
        ("c = {'t': {'num_workers': 0}}\nDataLoader(ds, num_workers=c['t']['num_workers'])\n", 2, "'num_workers': 8"),
        ("class L(DataLoader):\n    pass\nx = L(ds, 2)\n", 3, "L(ds, 2, num_workers=8)"),
        (
            "p.add_argument('-j', '--workers', default=0)\ndef make(n):\n    DataLoader(ds, num_workers=n)\n"
            "def main(args):\n    make(args.workers)\nmain(p.parse_args())\n",
            3,
            "'--workers', default=8",
        ),
        (
            "class DM:\n    def __init__(self, num_workers=0):\n        self.save_hyperparameters()\n"
            "    def train(self):\n        return DataLoader(ds, num_workers=self.hparams.num_workers)\nDM()\n",
            5,
            "def __init__(self, num_workers=8)",
        ),
        (
            "class DM:\n    def __init__(self, n):\n        self.n = n\n"
            "    def train(self):\n        return DataLoader(ds, num_workers=self.n)\nDM(n=0)\n",
            5,
            "DM(n=8)",
        ),
        (
            "def get_args():\n    p.add_argument('--workers', '-j', default=0)\n    return p.parse_args()\n"
            "def build(args):\n    return DataLoader(ds, num_workers=args.workers)\nargs = get_args()\nbuild(args)\n",
            5,
            "'-j', default=8",
        ),
        (
            "class Data:\n    n: int = 0\nclass C:\n    data: Data = field(default_factory=Data)\n"
            "def main(c: C):\n    DataLoader(ds, num_workers=c.data.n)\nmain(C())\n",
            6,
            "n: int = 8",
        ),
        ("DL = DataLoader\nx = DL(ds)\n", 2, "DL(ds, num_workers=8)"),
        ("x = DataLoader[int](ds)\n", 1, "DataLoader[int](ds, num_workers=8)"),
        ("x = DataLoader(ds, num_workers=0 if debug else 4)\n", 1, "num_workers=8 if debug else 4"),
        ("n = 0\nprint('%d workers' % n, n)\nx = DataLoader(ds, num_workers=n)\n", 3, "n = 8"),
        ("x = DataLoader(\r\n    ds,\r\n    batch_size=8,\r\n)\r\n", 1, "8,\r\n    num_workers=8,\r\n)"),
        ("def f():\n\tDataLoader(ds,\n\t\tbatch_size=8)\n", 2, "batch_size=8,\n\t\tnum_workers=8)"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_value_is_followed_to_where_it_is_written(source: str, line: int, changed: str) -> None:
    result = rewrite_call(source, line, EIGHT, NONE_YET)
    assert isinstance(result, Rewritten), result
    assert changed in result.source


@pytest.mark.parametrize(
    ("source", "line"),
    [
        # The same name in another scope, of another object, or of an object whose making is not seen.
        ("def other():\n    n = 0\ndef make(ds, n):\n    DataLoader(ds, num_workers=n)\n", 4),
        ("val.num_workers = 0\nx = DataLoader(ds, num_workers=cfg.num_workers)\n", 2),
        ("c = NS(**{'n': 0})\nv = NS(n=0)\nx = DataLoader(ds, num_workers=c.n)\n", 3),
        # Also set in a way that cannot be read.
        ("n = 0\nif big:\n    n = os.cpu_count()\nx = DataLoader(ds, num_workers=n)\n", 4),
        (
            "def get():\n    p.add_argument('--n', default=0)\n    o = p.parse_args()\n    o.n = min(o.n, cpus())\n"
            "    return o\nargs = get()\nDataLoader(ds, num_workers=args.n)\n",
            7,
        ),
        ("n = 0\nn += extra\nx = DataLoader(ds, num_workers=n)\n", 3),
        ("kw = {'a': 1}\nkw = {**kw, 'b': 2}\nx = DataLoader(ds, **kw)\n", 3),
        ("kw = {'num_workers': 0}\nkw.update(load())\nx = DataLoader(ds, **kw)\n", 3),
        # Not DataLoader's own arguments, or not known which of two calls it was.
        ("class L(DataLoader):\n    def __init__(self, ds):\n        super().__init__(ds, 8)\nx = L(ds)\n", 4),
        ("train, val = DataLoader(a, 8), DataLoader(b, 8)\n", 1),
        ("make = partial(DataLoader, ds, num_workers=0)\nx = make()\n", 2),
        # Bound again, but not by an assignment of its own scope.
        ("n = 0\nfor n in options():\n    x = DataLoader(ds, num_workers=n)\n", 3),
        ("n = 0\nwith options() as n:\n    x = DataLoader(ds, num_workers=n)\n", 3),
        ("n = 0\nmake = lambda n: DataLoader(ds, num_workers=n)\n", 2),
        ("n = 0\nx = [DataLoader(ds, num_workers=n) for n in options()]\n", 2),
        ("n = 0\ndef f():\n    global n\n    n = cpus()\nf()\nx = DataLoader(ds, num_workers=n)\n", 6),
        # The batch size would change with it.
        ("n = 0\nx = DataLoader(ds, batch_size=n + 8, num_workers=n)\n", 2),
        ("n = 0\nx = DataLoader(ds, n, num_workers=n)\n", 2),
        ("size = n = 0\nbatch = size\nx = DataLoader(ds, batch, num_workers=n)\n", 3),
        ("c = {'n': 0}\nx = DataLoader(ds, batch_size=8 * c['n'], num_workers=c['n'])\n", 2),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_a_value_that_may_come_from_elsewhere_is_left_alone(source: str, line: int) -> None:
    assert isinstance(rewrite_call(source, line, EIGHT, NONE_YET), Refused)


@pytest.mark.parametrize(
    ("source", "line", "given", "why"),
    [
        ("a = ds, 8, True, None, None, 0\nx = DataLoader(*a)\n", 2, "num_workers", "not followed"),
        ("kw = {}\nkw.setdefault('num_workers', 0)\nx = DataLoader(ds, **kw)\n", 3, "num_workers", "not followed"),
        ("kw = dict(num_workers=0)\nkw.clear()\nx = DataLoader(ds, **kw)\n", 3, "dataset", "taken out"),
        (
            "class L(DataLoader):\n    def __init__(self, d, **kw):\n        super().__init__(d, num_workers=0, **kw)\n"
            "x = L(ds)\n",
            4,
            "num_workers",
            "its constructor sets it",
        ),
    ],
)
def test_what_was_seen_goes_before_what_is_read(source: str, line: int, given: str, why: str) -> None:
    """An argument that came in a way that is not written there would be given twice, or changed to no effect."""
    result = rewrite_call(source, line, EIGHT, NONE_YET, given=("dataset", given))
    assert isinstance(result, Refused)
    assert why in result.why


def test_two_calls_of_one_line_are_told_apart_by_their_arguments() -> None:
    source = "val, train = DataLoader(b, 8), DataLoader(a, 8, shuffle=True)\n"
    result = rewrite_call(source, 1, EIGHT, NONE_YET, given=("dataset", "batch_size", "shuffle"))
    assert isinstance(result, Rewritten)
    assert result.source == source.replace("shuffle=True)", "shuffle=True, num_workers=8)")


def test_what_needs_workers_goes_where_the_workers_are() -> None:
    """As in PyTorch's own MNIST example: without a GPU the loader has no workers, and torch would refuse the rest."""
    source = (
        "kwargs = {'batch_size': 8}\nif cuda:\n    more = {'num_workers': 2, 'pin_memory': True}\n"
        "    kwargs.update(more)\nx = DataLoader(ds, **kwargs)\n"
    )
    result = rewrite_call(source, 5, WANTED, {**BEFORE, "pin_memory": True})
    assert isinstance(result, Rewritten)
    assert "kwargs = {'batch_size': 8}\n" in result.source
    assert "{'num_workers': 8, 'pin_memory': True, 'persistent_workers': True, 'prefetch_factor': 4}" in result.source


def test_a_dict_that_is_copied_keeps_out_what_needs_workers() -> None:
    source = "kw = dict(num_workers=2)\nx = DataLoader(a, **kw)\ny = DataLoader(b, **{**kw, 'num_workers': 0})\n"
    result = rewrite_call(source, 2, WANTED, BEFORE)
    assert isinstance(result, Rewritten)
    assert "kw = dict(num_workers=8)" in result.source
    assert f"DataLoader(a, **kw, {MORE})" in result.source


def test_what_depends_on_the_workers_already_is_left_to_do_so() -> None:
    source = "x = DataLoader(ds, num_workers=n, persistent_workers=(n > 0), prefetch_factor=2 if n else None)\n"
    result = rewrite_call(f"n = 0\n{source}", 2, {**WANTED, "pin_memory": False}, NONE_YET)
    assert isinstance(result, Rewritten)
    assert result.source == "n = 8\n" + source.replace("=2 if n", "=4 if n")


def test_workers_that_depend_on_a_condition_are_asked_for_as_they_will_be() -> None:
    result = rewrite_call("x = DataLoader(ds, num_workers=0 if a else 4)\n", 1, WANTED, NONE_YET)
    assert isinstance(result, Rewritten)
    assert "num_workers=8 if a else 4" in result.source
    assert "persistent_workers=(8 if a else 4) > 0" in result.source


def test_torchs_own_defaults_are_not_written() -> None:
    result = rewrite_call("x = DataLoader(ds)\n", 1, {**WANTED, "prefetch_factor": 2}, {"num_workers": 0})
    assert isinstance(result, Rewritten)
    assert result.source == "x = DataLoader(ds, num_workers=8, pin_memory=True, persistent_workers=True)\n"


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


@pytest.mark.parametrize(
    "source",
    [
        "\ufeffx = DataLoader(ds, batch_size=8)\n".encode(),
        "# -*- coding: latin-1 -*-\nx = DataLoader(ds, batch_size=8)  # für\n".encode("latin-1"),
        b"x = 1\n\x0c\ny = DataLoader(ds, batch_size=8)\n",
    ],
    ids=["byte order mark", "latin-1", "form feed"],
)
def test_a_diff_is_one_that_patch_takes_whatever_the_encoding(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "train.py").write_bytes(source)
    line = source.count(b"\n")
    loader = examples.loader(where=f"train.py:{line}", num_workers=0, batch_size=8)
    change = propose(loader, IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange), change
    assert change.new == source.replace(
        b"batch_size=8", b"batch_size=8, num_workers=8, pin_memory=True, persistent_workers=True"
    )
    body = [f"{part}\n" for part in change.diff.split("\n")[3:-1]]
    assert all(part[:1] in " +-" for part in body)
    before = "".join(part[1:] for part in body if part[:1] in " -")
    assert before.encode(change.encoding) == source, "patch compares bytes"


def test_what_the_parser_would_not_give_back_is_not_changed(tmp_path: Path) -> None:
    change = change_of(tmp_path, "x = DataLoader(ds, batch_size=8)\n\x0cdef main(): pass\n")
    assert isinstance(change, WriteYourself)
    assert "would not survive" in change.why


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
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        with pytest.raises(MachineError, match="cannot write into"):
            apply_change(change, None)
    apply_change(change, None)
    assert (tmp_path / "train.py").is_symlink()
    assert "num_workers=8" in (tmp_path / "real.py").read_text()


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
    assert isinstance(change, WriteYourself)
    assert change.write == (
        "TrainingArguments(…, dataloader_num_workers=8, dataloader_pin_memory=True, dataloader_persistent_workers=True)"
    )


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
    assert isinstance(change, WriteYourself)
    assert change.write == "DataLoader(…, num_workers=8, prefetch_factor=2)"


def test_workers_of_a_loader_that_each_epoch_makes_anew_are_not_told_to_stay(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("for epoch in range(5):\n    loader = DataLoader(ds, 8)\n")
    loader = examples.loader(where="train.py:2", num_workers=0, batch_size=8, constructed=5, passes=5)
    change = propose(loader, IN_FORCE, tmp_path)
    assert isinstance(change, SourceChange)
    assert "num_workers" in change.diff
    assert "persistent_workers" not in change.diff
    assert change.remarks[-1].startswith("the loader is made anew for each epoch")


def test_a_flag_of_the_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = DataLoader(ds, num_workers=args.num_workers)\n")
    loader = examples.loader(where="train.py:1", num_workers=0)
    change = propose(loader, IN_FORCE, tmp_path, ("train.py", "--num-workers", "0"))
    assert change == WriteYourself("--num-workers is given on the command line", "--num-workers 8")


def test_the_batch_size_is_written_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = DataLoader(ds, batch_size=8)\n")
    loader = examples.loader(where="train.py:1", num_workers=0, batch_size=8)
    change = propose(loader, IN_FORCE, tmp_path, with_batch=True)
    assert isinstance(change, SourceChange)
    assert b"batch_size=64" in change.new


def test_a_recipe_is_told_by_its_flags(tmp_path: Path) -> None:
    loader = examples.loader(where=None, made_by="fulltilt")
    assert propose(loader, IN_FORCE, tmp_path) == WriteYourself(
        "Fulltilt makes the loader from its settings", "--workers 8"
    )
    assert recipe_flags(Settings(num_workers=4, batch_size=16, accumulation=2, compile=True)) == (
        ["--workers", "4", "--batch-size", "16", "--accumulation", "2", "--compile"]
    )
