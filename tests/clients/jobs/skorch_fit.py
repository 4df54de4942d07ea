"""skorch: a classifier in scikit-learn's manner, which makes a loader for each epoch."""

import torch
from skorch import NeuralNetClassifier
from slow_data import EPOCHS, SlowRows, numbers, small_model, tell

SAMPLES = 320
order, steps = [], 0


class Classifier(NeuralNetClassifier):
    def train_step(self, batch, **fit_params):
        global steps
        steps += 1
        order.extend(numbers(batch[0], SAMPLES))
        return super().train_step(batch, **fit_params)


net = Classifier(
    small_model(),
    criterion=torch.nn.CrossEntropyLoss,
    max_epochs=2 * EPOCHS,
    lr=0.01,
    batch_size=8,
    train_split=None,
    iterator_train__shuffle=True,
    verbose=0,
)
net.fit(SlowRows(SAMPLES), y=None)
tell(steps, len(order), order)
