"""Every place where Fulltilt stands in torch's way: which entry point, what is noted there, and how it is put back.

| entry point                         | noted                                          |
|-------------------------------------|------------------------------------------------|
| utils.data.DataLoader.__init__      | where it was called, what was written there    |
| utils.data.DataLoader.__iter__      | every batch, through the tap                   |
| autograd.backward, autograd.grad    | backward                                       |
| optim (global step hooks)           | steps                                          |
| cuda.CUDAGraph                      | steps that are replays                         |
| amp.GradScaler.step                 | steps that the scaler skipped                  |
| amp.autocast.__enter__              | the precision in force                         |
| save                                | checkpoints                                    |
| nn.Module.train                     | evaluation mode of the trained model           |
| Tensor.to, .cuda                    | copies to the GPU                              |
| Tensor.item, .tolist, .cpu, bool(), | waits for the GPU                              |
| float(), int(), .nonzero            | (from the first step on a GPU on)              |
| cuda.synchronize                    | waits for the GPU                              |
| distributed.all_reduce, …           | explicit collectives                           |
| nn.parallel.DistributedDataParallel | the replica, for its own timings               |
| os._exit, .abort, .exec*            | the end of a process that runs no exit handler |
| sys.excepthook, threading.excepthook | nothing: errors are shown without our frames  |

Everything behaves as before for the caller: same values, same exceptions, same call when nothing is recorded.
"""

from __future__ import annotations

from typing import Any

from fulltilt.recorder.hooks.cuda import READS, DevicePatches, GraphPatches
from fulltilt.recorder.hooks.exchange import Exchange
from fulltilt.recorder.hooks.processes import COLLECTIVES, ErrorPatches, ExitPatches, RankPatches
from fulltilt.recorder.hooks.training import LoadingPatches, SavingPatches, SteppingPatches
from fulltilt.recorder.loaders import LoaderTaps
from fulltilt.recorder.recorder import Recorder

__all__ = ["COLLECTIVES", "READS", "Patches"]


class Patches:
    """The patches of one recorder. ``install`` puts them in place, ``restore`` takes them out again."""

    def __init__(self, torch: Any, recorder: Recorder, taps: LoaderTaps) -> None:
        self._exchange = Exchange()
        self.device = DevicePatches(torch, recorder)
        self.exits = ExitPatches(recorder)
        stepping = SteppingPatches(torch, recorder, taps, self.device.trains_on_gpu)
        self._parts = (
            LoadingPatches(torch, recorder, taps),
            stepping,
            GraphPatches(torch, recorder, stepping),
            SavingPatches(torch, recorder),
            self.device,
            RankPatches(torch, recorder),
            self.exits,
            ErrorPatches(),
        )

    @property
    def watches_copies(self) -> bool:
        """Whether copies to the GPU are noted; not where torchvision needs Tensor.to as it was."""
        return self.device.watches_copies

    def install(self) -> None:
        """Put all patches in place."""
        for part in self._parts:
            part.install(self._exchange)

    def restore(self) -> None:
        """Put every original back."""
        self._exchange.restore()
