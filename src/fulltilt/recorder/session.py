"""What records one process: the recorder, its observer, the loader registry and the hooks into torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fulltilt import batch_observer
from fulltilt.recorder.hooks import Patches
from fulltilt.recorder.hooks.compiling import CompileHooks
from fulltilt.recorder.hooks.cuda import DeviceHooks, GraphHooks
from fulltilt.recorder.hooks.dataloader import override_fastai, watch_iterables, watch_loaders
from fulltilt.recorder.hooks.processes import hide_our_threads, show_errors_without_ours, watch_ranks
from fulltilt.recorder.hooks.training import StepHooks, watch_garbage_collector, watch_saving
from fulltilt.recorder.import_watcher import imported_iterables
from fulltilt.recorder.loaders import LoaderRegistry
from fulltilt.recorder.loaders.settings_file import LoaderOverride, read_loader, read_settings
from fulltilt.recorder.observer import Observer
from fulltilt.recorder.profiler import StepProfiler
from fulltilt.recorder.rank_state import RankState
from fulltilt.recorder.recorder import Recorder


class Session:
    """Records this process into a run folder from ``install`` to ``finish``."""

    def __init__(self, torch: ModuleType, folder: Path, t0_ns: int, settings: str | None = None, deep: int = 0) -> None:
        self._torch: Any = torch
        self.state = RankState(torch)
        self.recorder = Recorder(folder, t0_ns, self.state)
        self.observer = Observer(self.recorder)
        self.loaders = LoaderRegistry(self.recorder, torch)
        self.state.loaders = self.loaders
        self.device = DeviceHooks(torch, self.recorder)
        self._steps = StepHooks(torch, self.recorder, self.loaders, self.device.trains_on_gpu)
        self._graphs = GraphHooks(torch, self.recorder, self._steps)
        self._patches = Patches()
        self._profiler = StepProfiler(torch, self.recorder, deep)
        self._settings = read_settings(Path(settings)) if settings else None
        self._settings_for = read_loader(Path(settings)) if settings else None

    def install(self) -> None:
        """Put the hooks in place. The observer starts with the first loader, backward or step."""
        if self._settings is not None:
            self.loaders.override = LoaderOverride(self._settings, self._settings_for)
            override_fastai(self._patches, self._settings)
            if self._settings.torch_threads:
                self._torch.set_num_threads(self._settings.torch_threads)
        self.patch()
        batch_observer.observe = self.loaders.observe_feed

    def patch(self) -> None:
        """Put the hooks into torch and Python in place; the table in ``hooks`` lists them."""
        torch, recorder, patches = self._torch, self.recorder, self._patches
        watch_loaders(patches, torch, recorder, self.loaders)
        for module in imported_iterables():
            self.watch_iterables(module)
        self._steps.install(patches)
        self._graphs.install(patches)
        CompileHooks(torch, recorder).install(patches)
        self._profiler.install(patches)
        watch_saving(patches, torch, recorder)
        watch_garbage_collector(patches, recorder)
        self.device.install(patches)
        watch_ranks(patches, torch, recorder)
        hide_our_threads(patches)
        show_errors_without_ours(patches)

    def watch_iterables(self, module: ModuleType) -> None:
        """Put a timer around the iterables of this library's module that training loops draw from."""
        watch_iterables(self._patches, module, self.loaders)

    def restore(self) -> None:
        """Put every original of torch's and Python's back."""
        self._patches.restore()

    def begin_here(self) -> None:
        """Install, and observe from now on: the calling thread is the one that trains."""
        self.recorder.use_this_thread()
        self.install()
        self.recorder.ensure_started()

    def finish(self) -> None:
        """Write everything and put torch back as it was."""
        if os.getpid() != self.recorder.pid:
            return
        self._profiler.finish()
        self.restore()
        batch_observer.observe = None
        try:
            if self.state.replicas:
                self.state.read_communication()
            self.observer.finish()
        except Exception as error:
            print(f"fulltilt: the record of this process is incomplete: {error}", file=sys.stderr)
