"""JPEG decoding: worker processes against nvJPEG on the GPU, decode and resize together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from feedbench.images import Images, make_images
from feedbench.measuring import Bench


def run_decode(bench: Bench) -> None:
    """Images per second for the files of COD and of CLIP."""
    sizes = (
        {"cod": (96, 64, 48), "clip": (48, 48, 32)}
        if bench.smoke
        else {"cod": (800, 600, 384), "clip": (400, 300, 224)}
    )
    for kind, (width, height, size) in sizes.items():
        folder = bench.folder / kind
        folder.mkdir()
        files = make_images(folder, 16 if bench.smoke else 512, width, height, masks=False)
        _on_cpu(bench, kind, Images(files, size))
        encoded = [torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8) for path, _ in files]
        for batch in (8, 16) if bench.smoke else (16, 64, 256):
            _on_device(bench, f"{kind}_gpu_batch_{batch}", encoded, batch, size)
        _on_device(bench, f"{kind}_gpu_decode_only_batch_64", encoded, 64, None)


def _on_cpu(bench: Bench, kind: str, dataset: Images) -> None:
    workers = 2 if bench.smoke else os.cpu_count() or 8
    parts = [list(range(start, len(dataset), workers)) for start in range(workers)]
    with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def work() -> None:
            list(pool.map(_decode_all, [(dataset, part) for part in parts]))

        bench.note("decode", f"{kind}_cpu_{workers}_processes", _rate(bench, work, len(dataset)))


def _on_device(bench: Bench, name: str, encoded: list[torch.Tensor], batch: int, size: int | None) -> None:
    from torchvision.io import decode_jpeg
    from torchvision.transforms.v2.functional import resize

    def work() -> None:
        for start in range(0, len(encoded), batch):
            for image in decode_jpeg(encoded[start : start + batch], device=bench.device):
                if size is not None:
                    resize(image, [size, size], antialias=True)

    try:
        bench.note("decode", name, _rate(bench, work, len(encoded)))
    except RuntimeError as error:
        bench.note("decode", f"{name}_failed", str(error).splitlines()[0][:200])


def _decode_all(task: tuple[Images, list[int]]) -> int:
    dataset, indices = task
    return sum(len(dataset[index][0]) for index in indices)


def _rate(bench: Bench, work: Callable[[], None], count: int) -> float:
    work()
    bench.drain()
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < (0.2 if bench.smoke else 1.5):
        work()
        rounds += 1
    bench.drain()
    return rounds * count / (time.perf_counter() - began)
