"""An error of the job's is shown without the frames of ours that it passed through; one of our own keeps them."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from typing import Any

import pytest

from fulltilt.recorder.hooks import Patches, timed
from fulltilt.recorder.hooks.processes import show_errors_without_ours
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.user_code import leave_out_ours, owner


class Elsewhere:
    """A recorder that minds another thread."""

    def on_training_thread(self) -> bool:
        return False


def passed_through(original: Any, *args: Any) -> Any:
    """A call through a wrapper of ours."""
    recorder: Any = Elsewhere()
    return timed(recorder, original, Activity.BACKWARD)(*args)


def fail() -> None:
    raise ValueError("the job's own")


def fail_again() -> None:
    try:
        passed_through(fail)
    except ValueError as error:
        raise KeyError("while handling it") from error


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("job", [fail, fail_again])
def test_our_frames_are_left_out_of_an_error_and_of_its_causes(job: Any) -> None:
    with pytest.raises((ValueError, KeyError)) as caught:
        passed_through(job)
    before = shown(caught.value)
    leave_out_ours(caught.value)
    assert "hooks/__init__.py" in before
    assert "hooks/__init__.py" not in shown(caught.value)
    frames = [line for line in before.splitlines() if line.startswith("  File") and "hooks/__init__.py" not in line]
    assert [line for line in shown(caught.value).splitlines() if line.startswith("  File")] == frames


def test_an_error_that_begins_in_our_code_keeps_its_frames() -> None:
    with pytest.raises(TypeError) as caught:
        passed_through(None)
    leave_out_ours(caught.value)
    assert "hooks/__init__.py" in shown(caught.value)


def test_errors_without_a_traceback_or_in_circles_are_no_problem() -> None:
    error, other = ValueError("never raised"), KeyError("nor this")
    error.__cause__, other.__cause__ = other, error
    leave_out_ours(error)
    leave_out_ours(None)
    assert error.__traceback__ is None


def test_threads_show_theirs_without_ours_too(capsys: pytest.CaptureFixture[str]) -> None:
    patches = Patches()
    plain = sys.excepthook, threading.excepthook
    threading.excepthook = threading.__excepthook__  # not pytest's own
    show_errors_without_ours(patches)
    try:
        passed_through(fail)
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    thread = threading.Thread(target=passed_through, args=(fail,))
    thread.start()
    thread.join()
    patches.restore()
    assert threading.excepthook is threading.__excepthook__
    sys.excepthook, threading.excepthook = plain
    told = capsys.readouterr().err
    assert told.count("ValueError: the job's own") == 2
    assert told.count("in fail") == 2
    assert "hooks/__init__.py" not in told


def test_hooks_that_the_script_has_set_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = Patches()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    show_errors_without_ours(patches)
    own: Any = lambda *_: None  # noqa: E731
    sys.excepthook = own
    patches.restore()
    assert sys.excepthook is own


def test_a_command_of_an_installed_package_is_not_the_users_code(tmp_path: Any) -> None:
    assert owner(f"{sysconfig.get_path('scripts')}/tune") == "site"
    assert owner(str(tmp_path / "bin" / "train.py")) == "user"
