"""A compiled model under the recorder: what is compiled must not depend on what the recorder does."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from fulltilt.timeline.session import Session


def test_a_compiled_model_is_not_compiled_anew_when_the_recorder_rests(tmp_path: Path) -> None:
    """Seen on a GPU alone, where the patches of ``to`` looked at the recorder before they asked for the compiler."""
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    recorder = session.recorder
    torch._dynamo.reset()
    counters.clear()
    try:
        recorder.clock = object()  # as with a GPU
        session.patches.device.trains_on_gpu()
        model = torch.compile(lambda x: x.to(torch.float64) * 2, backend="eager")
        for resting in (False, True, False, True):
            recorder.rest.on = resting
            assert model(torch.ones(3)).dtype == torch.float64
        assert counters["frames"]["ok"] == 1
    finally:
        recorder.clock, recorder.rest.on = None, False
        session.patches.restore()
        session.finish()
        torch._dynamo.reset()
