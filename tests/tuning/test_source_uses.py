"""What a change of the source must not reach, and values that are set in other ways than they are written."""

from __future__ import annotations

import pytest

from fulltilt.tuning.source_call import Refused, Rewritten, rewrite_call

WANTED = {"num_workers": 8, "prefetch_factor": 4, "persistent_workers": True}
BEFORE = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}


def changed(source: str, line: int) -> Rewritten:
    result = rewrite_call(source, line, WANTED, BEFORE)
    assert isinstance(result, Rewritten), result
    return result


# --------------------------------------------------------------------------- values that stand elsewhere


@pytest.mark.parametrize(
    ("source", "line", "settings"),
    [
        (
            "class C:\n    n = 0\n    ahead = None\n    keep = False\n"
            "DataLoader(ds, num_workers=C.n, prefetch_factor=C.ahead, persistent_workers=C.keep)\n",
            5,
            "n = 8\n    ahead = 4\n    keep = True\n",
        ),
        (
            "def mk(d, *, n=0, ahead=None, keep=False):\n"
            "    return DataLoader(d, num_workers=n, prefetch_factor=ahead, persistent_workers=keep)\nmk(ds)\n",
            2,
            "n=8, ahead=4, keep=True",
        ),
        (
            "ahead = None\nkeep = False\nn = 0\n"
            "DataLoader(ds, num_workers=n, prefetch_factor=ahead, persistent_workers=keep)\n",
            4,
            "ahead = 4\nkeep = True\nn = 8\n",
        ),
    ],
    ids=["class", "parameters", "constants"],
)
def test_what_needs_workers_asks_for_them_in_the_call_and_nowhere_else(source: str, line: int, settings: str) -> None:
    """The question stood where the value does: ``def mk(n=8, ahead=4 if n > 0 else None)`` ends with a NameError."""
    result = changed(source, line)
    assert settings in result.source
    call = result.source.split("DataLoader(")[1]
    assert "ahead if " in call
    assert "n > 0 else None" in call
    assert "keep and " in call


def test_what_needed_workers_before_is_only_changed() -> None:
    source = "n, ahead = 2, 2\nDataLoader(ds, num_workers=n, prefetch_factor=ahead)\n"
    before = {"num_workers": 2, "prefetch_factor": 2}
    result = rewrite_call(source, 2, {"num_workers": 8, "prefetch_factor": 4}, before)
    assert result == Rewritten(source.replace("2, 2", "8, 4"))


@pytest.mark.parametrize("value", ["None", "ahead"])
def test_what_torch_does_by_itself_is_not_written_over_none(value: str) -> None:
    source = f"ahead = None\nDataLoader(ds, num_workers=0, prefetch_factor={value})\n"
    result = rewrite_call(source, 2, {"num_workers": 8, "prefetch_factor": 2}, BEFORE)
    assert result == Rewritten(source.replace("num_workers=0", "num_workers=8"))


# --------------------------------------------------------------------------- other uses of a value


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("N = 0\nDataLoader(ds, num_workers=N)\ntorch.manual_seed(N)\n", 2),
        ("N = 0\nDataLoader(ds, num_workers=N)\ntorch.manual_seed(int(N))\n", 2),
        ("N = 0\nDataLoader(ds, num_workers=N)\nmodel = Net(depth=N or 4)\n", 2),
        ("N = 0\nDataLoader(ds, num_workers=N)\nseed = N\ntorch.manual_seed(seed)\n", 2),
        ("N = 0\ndef begin(seed):\n    torch.manual_seed(seed)\nbegin(N)\nDataLoader(ds, num_workers=N)\n", 5),
        (
            "class T:\n    def __init__(self, n=0):\n        self.n = n\n    def go(self):\n"
            "        torch.manual_seed(self.n)\n        DataLoader(ds, num_workers=self.n)\nT()\n",
            6,
        ),
        ("off = False\nDataLoader(ds, 8, shuffle=off, persistent_workers=off)\n", 2),
        ("off = False\nDataLoader(ds, 8, off, persistent_workers=off)\n", 2),
        ("off = False\nDataLoader(ds, 8, pin_memory=off, persistent_workers=off)\n", 2),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else None,
)
def test_a_value_that_the_training_goes_by_is_left_alone(source: str, line: int) -> None:
    """It was changed with the workers: another seed, another model, or shuffled data."""
    result = rewrite_call(source, line, WANTED, BEFORE)
    assert isinstance(result, Refused), result
    assert "computes something else" in result.why


@pytest.mark.parametrize(
    "use",
    [
        "print('workers', N)",
        "log.info('%d', N)",
        "name = make_name(f'w{N}')",
        "pool = ThreadPoolExecutor(max_workers=N or 1)",
        "run = wandb.init(config={'workers': N})",
        "val = DataLoader(other, num_workers=N)",
        "context = 'fork' if N else None",
        "assert N >= 0, N",
    ],
)
def test_telling_it_and_loading_with_it_is_no_other_use(use: str) -> None:
    assert changed(f"N = 0\ntrain = DataLoader(ds, num_workers=N)\n{use}\n", 2).source.startswith("N = 8\n")


# --------------------------------------------------------------------------- values that are set in other ways


FLAG = "p.add_argument('--n', default=0)\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (f"{FLAG}p.set_defaults(n=0)\nargs = p.parse_args()\nDataLoader(ds, num_workers=args.n)\n", 4),
        (f"{FLAG}p.set_defaults(**load())\nargs = p.parse_args()\nDataLoader(ds, num_workers=args.n)\n", 4),
        (f"{FLAG}args = p.parse_args(['--n', '0'])\nDataLoader(ds, num_workers=args.n)\n", 3),
        (f"{FLAG}args = p.parse_args()\nsetattr(args, key, 0)\nDataLoader(ds, num_workers=args.n)\n", 4),
        (f"{FLAG}args = p.parse_args()\nvars(args).update(load())\nDataLoader(ds, num_workers=args.n)\n", 4),
        ("c = NS(n=0)\nc.__dict__.update(load())\nDataLoader(ds, num_workers=c.n)\n", 3),
        (
            "class T:\n    n = 0\n    def __init__(self, **kw):\n        for k, v in kw.items():\n"
            "            setattr(self, k, v)\n    def go(self):\n        DataLoader(ds, num_workers=self.n)\nT(n=0)\n",
            7,
        ),
        ("@click.option('--n', default=0)\ndef main(n=0):\n    DataLoader(ds, num_workers=n)\nmain()\n", 3),
        (
            "class A:\n    n = 0\n    def go(self):\n        DataLoader(ds, num_workers=self.n)\n"
            "class B(A):\n    n = 0\nB().go()\n",
            4,
        ),
        (
            "class A:\n    n = 0\n    def go(self):\n        DataLoader(ds, num_workers=self.n)\n"
            "class B(A):\n    pass\nclass C(B):\n    def __init__(self):\n        self.n = 0\nC().go()\n",
            4,
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_a_default_that_something_else_is_put_over_is_left_alone(source: str, line: int) -> None:
    """The diff changed the default, and nothing came of it."""
    assert isinstance(rewrite_call(source, line, WANTED, BEFORE), Refused)


@pytest.mark.parametrize("decorator", ["torch.no_grad()", "functools.lru_cache", "staticmethod"])
def test_a_decorator_that_hands_its_arguments_on_hides_nothing(decorator: str) -> None:
    source = f"@{decorator}\ndef make(n=0):\n    return DataLoader(ds, num_workers=n)\nmake()\n"
    assert "def make(n=8)" in changed(source, 3).source


def test_a_class_that_inherits_with_workers_of_its_own_hides_no_other() -> None:
    source = (
        "class A:\n    n = 0\n    def go(self):\n        DataLoader(ds, num_workers=self.n)\n"
        "class B(A):\n    n = 4\nA().go()\n"
    )
    assert "class A:\n    n = 8\n" in changed(source, 4).source


def test_setattr_with_a_name_of_its_own_hides_no_other() -> None:
    source = f"{FLAG}args = p.parse_args()\nsetattr(args, 'lr', 1)\nDataLoader(ds, num_workers=args.n)\n"
    assert "'--n', default=8" in changed(source, 4).source


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("t, v = map(lambda d: DataLoader(d, 8), (a, b))\n", 1),
        ("for d in (a, b):\n    loaders.append(DataLoader(d, 8))\n", 2),
    ],
)
def test_a_call_that_may_make_several_loaders_is_told(source: str, line: int) -> None:
    assert "may make several loaders" in changed(source, line).remarks[-1]
