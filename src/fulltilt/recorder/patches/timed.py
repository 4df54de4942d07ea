"""A call that is an activity of its own when the user's code makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder


def timed(recorder: Recorder, original: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    """``original``, marked as ``activity`` while it runs on the training thread outside of any other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.mine() or recorder.activity is not Activity.USER:
            return original(*args, **kwargs)
        before = recorder.switch(activity)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.switch(before)

    return call
