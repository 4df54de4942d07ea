"""Ultralytics: YOLO on large images that are slow to read, with workers=0, a validation after each epoch."""

import os
import tempfile
import time
from pathlib import Path

os.environ["YOLO_CONFIG_DIR"] = tempfile.mkdtemp()
os.environ["YOLO_OFFLINE"] = "true"

import cv2
import numpy as np
from slow_data import EPOCHS, READ_S, tell
from ultralytics import YOLO
from ultralytics.data.base import BaseDataset

folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
for part, images in (("train", 24), ("val", 4)):
    (folder / "images" / part).mkdir(parents=True)
    (folder / "labels" / part).mkdir(parents=True)
    for number in range(images):
        image = cv2.resize(rng.integers(0, 255, (100, 100, 3), dtype=np.uint8), (2500, 2500))
        cv2.imwrite(str(folder / "images" / part / f"{number}.jpg"), image)
        (folder / "labels" / part / f"{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
(folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n  0: thing\n")

load_image = BaseDataset.load_image


def read_slowly(self, *args, **kwargs):
    time.sleep(10 * READ_S)
    return load_image(self, *args, **kwargs)


BaseDataset.load_image = read_slowly
steps = samples = 0


def count(trainer):
    global steps, samples
    steps += 1
    samples += trainer.args.batch


model = YOLO("yolo11n.yaml")
model.add_callback("on_train_batch_end", count)
model.train(
    data=str(folder / "data.yaml"),
    epochs=2 * EPOCHS,
    imgsz=32,
    batch=4,
    nbs=4,
    workers=0,
    mosaic=0.0,
    device="cpu",
    project=str(folder / "runs"),
    plots=False,
    amp=False,
    val=False,
    verbose=False,
)
tell(steps, samples)
