"""Keras on torch: model.fit with a PyDataset."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from slow_data import SlowRows, tell

steps = samples = 0


class Rows(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches
        self.rows = SlowRows(8 * batches)

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        pairs = [self.rows[number] for number in range(8 * index, 8 * index + 8)]
        return np.stack([row.numpy() for row, _ in pairs]), np.array([label for _, label in pairs])


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps, samples
        steps += 1
        samples += 8


model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(Rows(60), validation_data=Rows(10), epochs=1, verbose=0, callbacks=[Count()])
tell(steps, samples)
