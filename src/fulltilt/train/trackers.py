"""Metrics to TensorBoard, Weights & Biases and trackio, where they are installed. None of them can stop a training."""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from fulltilt import store

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class Tracker(Protocol):
    """Something that draws curves."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one point to each curve."""

    def close(self) -> None:
        """Let go, with everything written."""


class TensorBoard:
    """Event files in ``OUT/tensorboard``."""

    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(store.OwnedFolder(out).make(out / "tensorboard")))  # type: ignore[no-untyped-call, unused-ignore]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class Hosted:
    """wandb, or trackio, which took over its calls. A resumed training goes on with the curves it began."""

    def __init__(self, module: str, out: Path, project: str, config: Mapping[str, Any]) -> None:
        # The name of a folder is no name for a run: another machine has a folder of that name, too.
        path = out / f"{module}-run.txt"
        if not path.exists():
            store.write_text(path, f"{out.resolve().name}-{uuid.uuid4().hex[:8]}\n")
        name = path.read_text(encoding="utf-8").strip()
        own = {"id": name, "dir": str(out)} if module == "wandb" else {}
        self._run: Any = importlib.import_module(module).init(
            project=project, name=name, config=dict(config), resume="allow", **own
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See Tracker."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


class Trackers:
    """Those that were asked for and could be opened. One that fails is named once and left out from then on."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._open: dict[str, Tracker] = {}

    def start(self, asked: Sequence[TrackerName] | None, out: Path, project: str, config: Mapping[str, Any]) -> None:
        """Open them. Without a wish (None) TensorBoard is written where it is installed."""
        for name in ("tensorboard",) if asked is None else dict.fromkeys(asked):
            if importlib.util.find_spec(name) is None:
                if asked is not None:
                    self._warn(f"{name} is not installed, so nothing is logged there: pip install {name}")
                continue
            try:
                self._open[name] = TensorBoard(out) if name == "tensorboard" else Hosted(name, out, project, config)
            except Exception as error:
                self._give_up(name, error)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point for each of ``metrics``."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(metrics, step)
            except Exception as error:
                self._give_up(name, error)

    def close(self) -> None:
        """Let them write the rest."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.close()
            except Exception as error:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        first = (str(error).strip().splitlines() or [""])[0][:200]
        self._warn(f"{name} failed and is left out from here on ({type(error).__name__}: {first})")
