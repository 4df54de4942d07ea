"""skorch: a classifier in scikit-learn's manner."""

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from slow_data import EPOCHS, SlowRows, numbers, small_model, tell

SAMPLES = 320


class Count(Callback):
    def __init__(self):
        self.order, self.steps = [], 0

    def on_batch_end(self, net, batch=None, training=False, **kwargs):
        self.steps += 1
        self.order += numbers(batch[0], SAMPLES)


count = Count()
net = NeuralNetClassifier(
    small_model(),
    criterion=torch.nn.CrossEntropyLoss,
    max_epochs=2 * EPOCHS,
    lr=0.01,
    batch_size=8,
    train_split=None,
    iterator_train__shuffle=True,
    callbacks=[count],
    verbose=0,
)
net.fit(SlowRows(SAMPLES), y=None)
tell(count.steps, len(count.order), count.order)
