"""Keras on torch: model.fit on a loader of torch's own."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
from slow_data import SlowRows, tell
from torch.utils.data import DataLoader

SAMPLES = 404
steps = 0


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        global steps
        steps += 1


model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
train_loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True)
held_out = DataLoader(SlowRows(80), batch_size=8)
model.fit(train_loader, epochs=2, validation_data=held_out, verbose=0, callbacks=[Count()])
tell(steps, 2 * SAMPLES)
