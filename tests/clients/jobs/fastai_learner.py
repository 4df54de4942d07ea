"""fastai: a Learner with its own DataLoaders, which build torch's iterators themselves."""

import fastai.callback.schedule  # noqa: F401 - gives the Learner fit_one_cycle
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from slow_data import EPOCHS, SlowRows, small_model, tell
from torch.nn.functional import cross_entropy


class Count(Callback):
    steps = samples = 0

    def after_step(self):
        self.steps += 1
        self.samples += len(self.xb[0])


count = Count()
loaders = DataLoaders.from_dsets(SlowRows(320), SlowRows(32), bs=8, num_workers=0, device="cpu")
learner = Learner(loaders, small_model(), loss_func=cross_entropy, cbs=count)
with learner.no_logging():
    learner.fit_one_cycle(2 * EPOCHS, 0.01)
tell(count.steps, count.samples)
