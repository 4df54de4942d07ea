"""A stack sample says whose time it is and names the user's line."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import gc
import importlib
import io
import json
import multiprocessing
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import fulltilt
from fulltilt.recorder import user_code
from fulltilt.recorder.loaders import registry
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks.frames import (
    KnownLoop,
    LoopFrames,
    Stack,
    StackView,
    stack_of,
    user_code_in_backward,
    users_line,
    view_of,
)
from fulltilt.recorder.user_code import owner

FEWEST_LOOKS = 20  # also on a machine that is full


def looks_at(
    work: Callable[[], Any],
    seconds: float = 0.25,
    holding: frozenset[CodeType] = frozenset(),
    stepping: frozenset[CodeType] = frozenset(),
) -> list[StackView]:
    """Stack samples of a thread that does ``work`` over and over."""
    going = [True]

    def loop() -> None:
        while going[0]:
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    views = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(views) < FEWEST_LOOKS:
        time.sleep(0.005)
        stack = stack_of(thread.ident or 0)
        if stack is not None and (view := view_of(stack, None, KnownLoop(loop=holding, step=stepping))) is not None:
            views.append(view)
    going[0] = False
    thread.join()
    return views


def share(views: list[StackView], kind: str) -> float:
    return sum(view.kind == kind for view in views) / len(views)


def test_matrix_products_on_a_users_line_are_torchs_work() -> None:
    a = torch.randn(400, 400)

    def work() -> Any:
        return a @ a

    assert share(looks_at(work), "torch") > 0.7


def test_a_module_is_torchs_work_and_sleep_inside_it_is_not() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            return x

    linear, slow = torch.nn.Linear(600, 600), Slow()
    x = torch.randn(200, 600)
    assert share(looks_at(lambda: linear(x)), "torch") > 0.7
    views = looks_at(lambda: slow(x))
    assert share(views, "host") > 0.7
    assert {view.call for view in views if view.kind == "host"} >= {"time.sleep(0.01)"}


def test_a_model_and_its_optimizer_are_of_the_training_and_averaged_weights_are_not() -> None:
    model = torch.nn.Linear(600, 600)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, weights = torch.randn(200, 600), [parameter.detach() for parameter in model.parameters()]

    def follow() -> None:
        for kept, now in zip(average.parameters(), weights, strict=True):
            kept.detach().mul_(0.9).add_(now, alpha=0.1)

    def of_training(work: Callable[[], Any]) -> float:
        views = looks_at(work, 0.15)
        return sum(view.of_training for view in views) / len(views)

    model(x).sum().backward()
    assert min(of_training(lambda: model(x)), of_training(optimizer.step)) > 0.7
    assert max(of_training(follow), of_training(lambda: average.update_parameters(model))) < 0.2


def test_an_import_is_told_from_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("import time\ntime.sleep(0.02)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def save_checkpoint() -> None:
        sys.modules.pop("imported_late", None)
        importlib.import_module("imported_late")

    assert share(looks_at(save_checkpoint), "import") > 0.7


def test_what_trains_while_it_is_imported_is_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trains_at_once.py").write_text("train()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[StackView | None] = []

    def train() -> None:
        stack = stack_of(threading.get_ident())
        assert stack is not None
        seen.extend(view_of(stack, None, KnownLoop(spots)) for spots in (frozenset(), frozenset(stack.calls[1:])))

    monkeypatch.setattr(builtins, "train", train, raising=False)
    importlib.import_module("trains_at_once")
    assert [view.kind for view in seen if view] == ["import", "host"]


def test_json_of_weights_is_the_users_line() -> None:
    weights = [float(i) for i in range(50_000)]

    def work() -> Any:
        return json.dumps(weights)

    views = looks_at(work)
    assert share(views, "host") > 0.8
    line = work.__code__.co_firstlineno + 1
    assert any(view.where.endswith(f"test_frames.py:{line}") for view in views)


def test_what_a_users_line_leads_to_is_the_function_called_and_the_innermost(tmp_path: Path) -> None:
    weights = [float(i) for i in range(50_000)]
    np.savez_compressed(tmp_path / "a.npz", x=np.random.default_rng(0).random(400_000))

    def read() -> Any:
        return np.load(tmp_path / "a.npz")["x"]

    def most(work: Callable[[], Any]) -> str | None:
        return Counter(view.inside for view in looks_at(work)).most_common(1)[0][0]

    assert most(lambda: json.dumps(weights)) == "json/__init__.py:dumps"
    assert str(most(read)).split()[0].endswith(":NpzFile.__getitem__")
    assert str(most(read)).startswith("numpy/lib/")
    assert most(lambda: sorted(weights)) is None


def test_tolist_is_the_hosts_time_and_not_computation() -> None:
    x = torch.randn(300_000)

    def work() -> Any:
        return x.tolist()

    assert share(looks_at(work), "host") > 0.7


def test_a_pure_python_loop_is_the_hosts_time() -> None:
    def work() -> int:
        total = 0
        for i in range(20_000):
            total += i * i
        return total

    assert share(looks_at(work), "host") > 0.9


def nap(number: int) -> int:
    time.sleep(0.01)
    return number


@contextlib.contextmanager
def logged() -> Iterator[None]:
    yield
    nap(1)


def enter_and_leave() -> None:
    with logged():
        pass


def test_a_generator_makes_data_only_where_it_is_drawn_from() -> None:
    """Half of a job was called waiting for data: ``sum(len(re.findall(...)) for name in names)``, a metric."""

    def loop(batches: Iterator[int]) -> None:
        for _ in batches:
            return

    def endless() -> Iterator[int]:
        while True:
            yield nap(1)

    function, expression = endless(), (nap(n) for n in range(10**9))
    for work in (lambda: next(function), lambda: next(expression), lambda: loop(expression)):
        assert share(looks_at(work, 0.15), "data_wait") > 0.8
    for work in (lambda: sum(nap(n) for n in range(3)), lambda: max(n for n in (nap(n) for n in range(3)))):
        assert share(looks_at(work, 0.15), "host") > 0.8
    assert share(looks_at(enter_and_leave, 0.15), "host") > 0.8


def test_the_generator_that_a_loop_iterates_is_named_not_those_inside_it() -> None:
    def decoded() -> Iterator[int]:
        while True:
            yield nap(1)

    def batches(size: int) -> Iterator[list[int]]:
        for _ in range(size):
            yield [next(rows)]

    def loop() -> None:
        for _ in batches(1):
            pass

    def loop_over(made: Iterator[Any]) -> None:
        for _ in enumerate(made):
            return

    rows = decoded()
    for work, call in ((loop, "batches(1)"), (lambda: loop_over(batches(1)), "enumerate(made)")):
        (drawn,) = {view.drawn_from for view in looks_at(work, 0.15) if view.kind == "data_wait"}
        assert drawn is not None
        where, generator, expression = drawn
        assert (generator.rpartition(".")[2], expression) == ("batches", call)
        assert "test_frames.py:" in where


def test_what_a_generator_has_torch_do_is_torchs_and_names_the_generator() -> None:
    images = torch.rand(8, 3, 64, 64)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield torch.nn.functional.interpolate(images, scale_factor=2.0, mode="bilinear")

    made = batches()
    drawn = [view.drawn_from for view in looks_at(lambda: next(made), 0.15) if view.kind == "torch"]
    assert sum(from_ is not None for from_ in drawn) > 0.8 * len(drawn) > 0


class Reader:
    """An iterator that is no generator."""

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> int:
        return sum(range(20_000))


def test_an_iterator_of_the_users_own_makes_data() -> None:
    read = iter(Reader())
    assert share(looks_at(lambda: next(read)), "data_wait") > 0.7


def test_a_generator_that_holds_the_training_loop_makes_no_data() -> None:
    def train() -> Iterator[int]:
        yield sum(i * i for i in range(100_000))

    def spin() -> None:
        for _ in train():
            pass

    holds = {code for code in train.__code__.co_consts if isinstance(code, CodeType)} | {train.__code__}
    kinds = {loop: {view.kind for view in looks_at(spin, holding=loop)} for loop in (frozenset(), frozenset(holds))}
    assert ["data_wait" in seen for seen in kinds.values()] == [True, False]


@pytest.mark.parametrize("holds", ["holding", "stepping"])
def test_the_line_of_the_loop_that_calls_a_function_is_named_beside_the_line_inside_it(holds: str) -> None:
    def longest(words: list[str]) -> str:
        return max(words, key=len)

    def train() -> None:
        for _ in range(10):
            longest(["a", "bc"] * 20_000)

    views = looks_at(train, seconds=1.0, **{holds: frozenset({train.__code__})})  # type: ignore[arg-type]
    inside = [view for view in views if view.function.endswith("longest")]
    calls = {view.call for view in inside if view.call}  # at its beginning there is no text, at its end it returns
    assert "max(words, key=len)" in calls
    assert calls <= {"max(words, key=len)", "return max(words, key=len)"}
    # The thread may run on between the looks at two of its frames.
    called = [view.called_at[2] if view.called_at else None for view in inside]
    assert called.count('longest(["a", "bc"] * 20_000)') > len(called) / 2
    assert not any(view.called_at for view in views if view.function.endswith("train"))


def test_what_a_function_computes_is_told_with_the_line_of_the_loop_that_calls_it() -> None:
    """A metric's forward passes were lost among those of the training."""
    model = torch.nn.Linear(600, 600)

    @torch.no_grad()
    def metric(x: torch.Tensor) -> None:
        model(x).sum()

    def train() -> None:
        x = torch.randn(200, 600)
        for _ in range(10):
            metric(x)
        for _ in range(10):
            model(x)

    views = [view for view in looks_at(train, holding=frozenset({train.__code__})) if view.kind == "torch"]
    assert {view.called_at[2] for view in views if view.called_at} == {"metric(x)"}
    assert {view.function.endswith("metric") for view in views if view.called_at} == {True}
    assert any(view.function.endswith("train") for view in views)


def test_a_function_that_the_loop_calls_for_a_whole_step_is_part_of_it() -> None:
    """training_step(batch) was said to be taken out of the step."""
    frames = LoopFrames()

    def clip() -> None:
        pass

    def training_step() -> None:
        frames.see(Activity.BACKWARD, sys._getframe())
        clip()
        frames.see(Activity.OPTIMIZER, sys._getframe())

    def fit() -> None:
        frames.see(Activity.DATA_WAIT, sys._getframe())
        training_step()

    fit()
    assert training_step.__code__ in frames.known.step - frames.loop
    assert fit.__code__ in frames.known.step & frames.loop
    assert clip.__code__ not in frames.known.step


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collections begin between instructions there")
def test_no_garbage_is_collected_while_a_stack_is_walked() -> None:
    """Seen to fail: a finalizer let the training thread go on, its frame was freed, and the job died of SIGSEGV."""
    arrived, leave, collections = threading.Event(), threading.Event(), list[str]()

    def deep(calls: int) -> None:
        if calls:
            deep(calls - 1)
        else:
            arrived.set()
            leave.wait()

    thread = threading.Thread(target=deep, args=(50,))
    thread.start()
    arrived.wait()
    threshold = gc.get_threshold()
    gc.callbacks.append(note := lambda phase, _info: collections.append(phase))
    gc.set_threshold(1)
    try:
        stack = stack_of(thread.ident or 0)
        seen = len(collections)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
        leave.set()
        thread.join()
    assert stack is not None
    assert len(stack.calls) > 50
    assert seen == 0
    assert gc.isenabled()


@pytest.mark.parametrize("ends", [False, True])
def test_who_waits_for_a_thread_or_a_process_may_wait_for_a_batch_but_not_at_its_end(ends: bool) -> None:
    ready: queue.Queue[int] = queue.Queue()
    sent: multiprocessing.Queue[int] = multiprocessing.Queue()

    def short() -> None:
        time.sleep(0.02)

    def joins() -> None:
        thread = threading.Thread(target=short)
        thread.start()
        thread.join()

    async def served() -> None:
        await asyncio.sleep(0.02)

    def receives() -> None:  # in C, called by multiprocessing itself
        receiving, sending = multiprocessing.Pipe(duplex=False)
        thread = threading.Timer(0.02, sending.send, (1,))
        thread.start()
        receiving.recv()

    def gets(waiting: Any) -> Callable[[], None]:
        def work() -> None:
            with contextlib.suppress(queue.Empty):
                waiting.get(timeout=0.02)

        return work

    batches = (gets(ready), gets(sent), receives, lambda: asyncio.run(served()))
    endings = (joins, lambda: subprocess.run(["sleep", "0.05"], check=True))
    for work in endings if ends else batches:
        waits = [view for view in looks_at(work) if view.waits]
        assert len(waits) > 5
        assert {view.kind for view in waits} <= ({"host"} if ends else {"host", "waiting"})
        assert ends or share(waits, "waiting") > 0.5  # threads, pipes and loops are also made, which brings no batch


def test_a_sampler_is_seen_with_workers_as_without() -> None:
    class Slow(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                time.sleep(0.005)
                yield 0

    for num_workers in (0, 1):
        loader = torch.utils.data.DataLoader([1.0], sampler=Slow(), num_workers=num_workers)
        batches = iter(loader)
        next(batches)  # on a full machine a worker takes longer to start than what is looked at
        assert sum(view.sampling for view in looks_at(lambda batches=batches: next(batches))) > 5  # type: ignore[misc]
    assert not any(view.sampling for view in looks_at(lambda: time.sleep(0.005)))


def test_what_a_script_does_to_save_is_saving() -> None:
    def save_checkpoint() -> None:
        time.sleep(0.01)  # zipping it, sending it elsewhere

    def save() -> None:
        torch.save({}, io.BytesIO())
        time.sleep(0.01)  # os.replace, fsync

    def save_figure() -> None:
        time.sleep(0.01)

    assert share(looks_at(save_checkpoint, 0.15), "checkpoint") > 0.8
    assert share(looks_at(save, 0.15), "checkpoint") > 0.8
    assert share(looks_at(save, 0.15, frozenset({save.__code__})), "checkpoint") < 0.5  # the loop itself
    assert share(looks_at(save_figure, 0.15), "checkpoint") == 0


def test_keeping_a_copy_of_the_weights_is_not_computation() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    weights = model.state_dict()
    views = looks_at(lambda: copy.deepcopy(weights))
    assert share(views, "host") > 0.8
    assert any("deepcopy" in (view.call or "") for view in views)


def test_code_of_the_users_inside_backward_is_seen_and_torchs_own_is_not() -> None:
    seen: list[tuple[bool, StackView | None]] = []

    def note(gradient: torch.Tensor) -> torch.Tensor:
        stack = stack_of(threading.get_ident())
        assert stack is not None
        seen.append((user_code_in_backward(stack), view_of(stack)))
        return gradient

    note(torch.ones(1))
    weights = torch.ones(1, requires_grad=True)
    weights.register_hook(note)
    (2 * weights).sum().backward()
    (outside, _), (inside, view) = seen
    assert not outside
    assert inside is True
    assert view is not None
    assert view.where.startswith("tests/recorder/test_frames.py:")


def test_owners() -> None:
    assert owner(torch.nn.functional.__file__) == "torch"
    assert owner(torch.serialization.__file__) == "torch_save"
    assert owner(torch.utils.data.__file__) == "torch_data"
    assert owner(json.__file__) == "stdlib"
    assert owner("<frozen importlib._bootstrap>") == "stdlib"
    assert owner(__file__) == "user"


def test_a_sample_keeps_nothing_that_a_function_has_let_go_of() -> None:
    class Activations:
        pass

    dropped, looked = threading.Event(), threading.Event()
    alive: list[weakref.ref[Activations]] = []

    def step() -> None:
        kept = Activations()
        alive.append(weakref.ref(kept))
        looked.wait(10)  # the position at which the samples are taken
        del kept
        dropped.set()
        looked.clear()
        looked.wait(10)

    thread = threading.Thread(target=step)
    thread.start()
    while not alive:
        time.sleep(0.001)
    for _ in range(20):
        stack = stack_of(thread.ident or 0)
        assert stack is not None
        view_of(stack)
    looked.set()
    assert dropped.wait(10)
    assert alive[0]() is None
    looked.set()
    thread.join()


def test_what_started_our_own_trainings_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fulltilt.cli", ModuleType("fulltilt.cli"))
    home = Path(fulltilt.__file__).parent
    files = [home / "train" / "step.py", home / "cli" / "train.py", Path("/x/site-packages/typer/main.py")]
    step, command, typer = ((compile("pass", str(file), "exec"), 0) for file in files)
    view = view_of(Stack([step, command, typer], {}))
    assert view is not None
    assert view.where.endswith("train/step.py:1")
    view = view_of(Stack([step, typer], {}))
    assert view is not None
    assert view.where == "typer/main.py:1"


def test_what_the_package_of_the_loop_calls_is_named_by_its_first_function() -> None:
    """A logger's database took the time: line 954 of sqlalchemy/engine/default.py was named."""
    files = ("sqlalchemy/engine.py", "sqlalchemy/session.py", "mlflow/client.py", "trainers/log.py", "trainers/loop.py")
    spots = [(compile(f"x = {file!r}", f"/x/site-packages/{file}", "exec"), 0) for file in files]
    view = view_of(Stack(spots, {}), None, KnownLoop(loop=frozenset({spots[-1][0]})))
    assert view is not None
    assert (view.kind, view.where) == ("host", "mlflow/client.py:1")
    assert view.inside == "mlflow/client.py:<module> sqlalchemy/engine.py:<module>"
    own = view_of(Stack(spots[3:], {}), None, KnownLoop(loop=frozenset({spots[-1][0]})))
    assert own is not None
    assert own.where == "trainers/log.py:1"


def test_a_line_that_leads_into_the_loop_is_named_before_one_of_pythons_own_library() -> None:
    """A loop under asyncio was blamed on line 468 of selectors.py."""
    waits = (asyncio.SelectorEventLoop.run_forever.__code__, 0)
    begins = (compile("asyncio.run(main())", "train.py", "exec"), 0)
    view = view_of(Stack([waits, begins], {}), None, KnownLoop(frozenset({begins})))
    assert view is not None
    assert view.where == "train.py:1"


def test_a_thread_that_has_ended_has_no_stack() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert stack_of(thread.ident or 0) is None


def called_from(part: str, function: Callable[[], Any]) -> Any:
    """What ``function`` gives when a file of Fulltilt's calls it, itself called by a line of the user's: this one."""

    def patch() -> Any:  # a patch of torch's stands between the two
        return function()

    names: dict[str, Any] = {"patch": patch}
    exec(compile("answer = patch()", str(Path(fulltilt.__file__).parent / part), "exec"), names)
    return names["answer"]


def test_what_starts_our_own_command_line_is_no_line_of_the_users() -> None:
    """A recipe's validation was blamed on line 10 of the script that pip writes for `fulltilt`."""
    assert called_from("feed/loader.py", users_line)[0].startswith("tests/recorder/test_frames.py:")
    assert called_from("cli/train.py", users_line) == ("unknown:0", "unknown")


def test_the_feeds_loaders_have_a_place_only_where_the_user_draws_from_them() -> None:
    where, made_by = called_from("feed/loader.py", registry._feed_call_site)
    assert (where.partition(":")[0], made_by) == ("tests/recorder/test_frames.py", None)
    assert called_from("train/loop.py", registry._feed_call_site) == (None, "fulltilt")


def test_an_installation_below_a_folder_named_train_is_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    home = "/home/me/train/recipes/venv/fulltilt/"
    monkeypatch.setattr(user_code, "_HOME", home)
    user_code.owner.cache_clear()
    try:
        assert called_from(f"{home}feed/loader.py", registry._feed_call_site)[1] is None
        assert called_from(f"{home}train/loop.py", registry._feed_call_site) == (None, "fulltilt")
        assert user_code.own_package("/home/me/train/x.py") is None
    finally:
        user_code.owner.cache_clear()
