"""How users of other training libraries write what a finding advises: one entry for each library.

A loader that a library made is changed by that library's argument, not in its code. To add a library, add an entry: its
import name, and what differs from plain PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fulltilt.records import HotLine, LoaderRecord

_SAME = {name: name for name in ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "batch_size")}


@dataclass(frozen=True, slots=True)
class Library:
    """``call`` takes the settings; ``names`` maps DataLoader's arguments to the library's, without those that it lacks.

    ``save`` and ``validate`` say how to do so less often; ``functions`` are the functions and classes that take the
    settings as keywords, as scripts call them.
    """

    call: str
    names: Mapping[str, str] = field(default_factory=lambda: dict(_SAME))
    save: str | None = None
    validate: str | None = None
    functions: tuple[str, ...] = ()


_HUGGING_FACE = Library(
    "TrainingArguments(..., {})",
    {name: f"dataloader_{name}" for name in _SAME} | {"batch_size": "per_device_train_batch_size"},
    save="save_steps= (or save_strategy='epoch') in its TrainingArguments",
    validate="eval_steps= (or eval_strategy='epoch') in its TrainingArguments",
    functions=(
        *("TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments"),
        *("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "ORPOConfig"),
    ),
)
LIBRARIES: dict[str, Library] = {
    "fulltilt": Library(  # the training engine, which keeps its workers alive and pins by itself
        "{} in the training's settings",
        {"num_workers": "workers", "prefetch_factor": "prefetch"},
        validate="eval_every in the settings",
    ),
    "transformers": _HUGGING_FACE,
    "sentence_transformers": replace(_HUGGING_FACE, call="SentenceTransformerTrainingArguments(..., {})"),
    "trl": replace(_HUGGING_FACE, call="GRPOConfig(..., {}), SFTConfig or their like"),
    "accelerate": Library("DataLoader(..., {}) before accelerator.prepare"),
    "lightning": Library(
        "DataLoader(..., {}) in train_dataloader() of the DataModule or LightningModule",
        save="ModelCheckpoint(every_n_epochs=...) or every_n_train_steps=",
        validate="Trainer(check_val_every_n_epoch=...) or val_check_interval=",
    ),
    "ultralytics": Library(
        "model.train(..., {})",
        {"num_workers": "workers", "batch_size": "batch"},
        save="model.train(..., save_period=...), or save=False while trying things out",
        validate="model.train(..., val=False) validates after the last epoch only",
        functions=("train",),
    ),
    "fastai": Library(
        "{} in DataBlock.dataloaders(...) or DataLoaders.from_dsets(...)",
        {"num_workers": "num_workers", "pin_memory": "pin_memory", "batch_size": "bs"},  # its workers never persist
        functions=("dataloaders", "from_dsets", "from_dblock", "from_folder", "from_name_func", "from_df", "from_csv"),
    ),
    "timm": Library(
        "create_loader(..., {})",
        {name: name for name in _SAME if name != "prefetch_factor"},
        save="--checkpoint-hist and --recovery-interval of train.py",
        functions=("create_loader",),
    ),
    "skorch": Library(
        "NeuralNet(..., {})",
        {name: f"iterator_train__{name}" for name in _SAME if name != "batch_size"},
        save="Checkpoint(monitor=...) as callback, which saves only what improves",
        functions=("NeuralNet", "NeuralNetClassifier", "NeuralNetBinaryClassifier", "NeuralNetRegressor"),
    ),
    "keras": Library(
        "super().__init__({}, use_multiprocessing=True) in the PyDataset that makes the batches",
        {"num_workers": "workers"},
        save="ModelCheckpoint(save_freq=...)",
        validate="model.fit(..., validation_freq=...)",
    ),
    "torchtitan": Library(
        "{} on its command line",
        {name: f"--training.dataloader.{name}" for name in _SAME} | {"batch_size": "--training.local_batch_size"},
        save="--checkpoint.interval",
        validate="--validation.freq",
    ),
    "webdataset": Library("webdataset.WebLoader(..., {})"),
    "stable_baselines3": Library(
        "{}",
        save="CheckpointCallback(save_freq=...)",
        validate="EvalCallback(eval_freq=...)",
    ),
}
LIBRARIES["pytorch_lightning"] = LIBRARIES["lightning"]


def loader_call(made_by: str, settings: Mapping[str, object]) -> str | None:
    """How a user of this library writes these settings of its loader; None for a library without an entry."""
    library = LIBRARIES.get(made_by)
    if library is None:
        return None
    written = (f"{library.names[name]}={value}" for name, value in settings.items() if name in library.names)
    return library.call.format(", ".join(written))


def setting_name(loader: LoaderRecord, name: str) -> str:
    """What the library that made this loader calls one of DataLoader's arguments."""
    return _maker(loader).names.get(name, name)


def keeps_workers(loader: LoaderRecord) -> bool:
    """Whether the library that made this loader has a setting for persistent workers."""
    return "persistent_workers" in _maker(loader).names


def _maker(loader: LoaderRecord) -> Library:
    return LIBRARIES.get(loader.made_by or "", Library("DataLoader(..., {})"))


def library_of(line: HotLine | None) -> Library | None:
    """The library with an entry whose own code a line is in."""
    return LIBRARIES.get(line.where.partition("/")[0]) if line is not None else None


def is_library_code(line: HotLine) -> bool:
    """Whether a line is in an installed package, which users do not change: then it is inside of itself."""
    path = line.where.rpartition(":")[0]
    return library_of(line) is not None or (line.inside or "").startswith(f"{path}:")


# --------------------------------------------------------------------------- calls that make fetching expensive


@dataclass(frozen=True, slots=True)
class CostlyCall:
    """A library call that is costly if made for every sample.

    ``pattern`` is searched in the line's function, the library functions around it, and its call; ``does`` says why it
    is expensive, ``instead`` what to do. An ``easy`` change takes a few lines of the script and leaves stored data as
    it is: it is advised before workers.
    """

    pattern: str
    does: str
    instead: str
    easy: bool = False


_MAPPED = "keep arrays as .npy, of which numpy.load(path, mmap_mode='r') reads only what is used"
# The first that matches counts.
COSTLY_CALLS = (
    CostlyCall(
        r"\b(ZipFile|tarfile\.open|h5py\.File|sqlite3\.connect|lmdb\.open)\([^()]*\)$",
        "opens a file and reads its index anew for each sample",
        "open it once in each worker (in the first __getitem__, not in __init__) and keep it",
        easy=True,
    ),
    CostlyCall(
        r"\b(h5py|tables)/",
        "reads HDF5, which decompresses all chunks that a read touches, where it is compressed",
        "read as many rows at a time as a chunk has, store it in chunks of what one sample reads (h5repack -l), or "
        "draw batches from fulltilt.feed.hdf5, which reads whole chunks once",
    ),
    CostlyCall(
        r"\bzarr/",
        "reads Zarr: each read decompresses all chunks that it touches",
        "read as many rows at a time as a chunk has, or store it in chunks of what one sample reads",
    ),
    CostlyCall(
        r"\bPIL/(ImageFile|\w+ImagePlugin)\.py|\b(torchvision/io|skimage/io|imageio)/|\bcv2?\.im(read|decode)\(",
        "decodes a whole image file for each sample",
        "store the images once in the size that the training uses, or keep the decoded ones (fulltilt.feed); JPEG "
        "files can be decoded smaller (image.draft, cv2.IMREAD_REDUCED_COLOR_2)",
    ),
    CostlyCall(
        r"\b(decord|torchcodec|av|torchvision/io/video)/|VideoCapture|VideoReader",
        "decodes video, from the key frame before on, for each sample",
        "cut it into short clips or frames once, or store it with more key frames",
    ),
    CostlyCall(
        r"\b(librosa|soundfile|torchaudio|audioread|pydub)\b",
        "decodes or resamples audio for each sample",
        "store it once, decoded and at the rate that the training uses",
    ),
    CostlyCall(r"\bNpzFile\.", "unpacks a whole array of an .npz archive for each sample", _MAPPED),
    CostlyCall(
        r"\bpandas/io/|\bpd\.read_\w+\(|\bcsv\.py|\bnumpy/lib/\S*(loadtxt|genfromtxt)",
        "parses a file for each sample",
        f"parse it once, and {_MAPPED}",
    ),
    CostlyCall(
        r"\bpandas/",
        "takes a row out of a pandas table for each sample, some 0.05 ms each",
        "convert the columns once, in __init__ (df['x'].to_numpy()), and index the arrays",
        easy=True,
    ),
    CostlyCall(
        r"\bjson/|\b(u|or)?json\.loads?\(|\byaml/|\bxml/",
        "parses text for each sample",
        f"parse it once, and {_MAPPED} (or Arrow files, for what is no array)",
    ),
    CostlyCall(
        r"\b(pickle|joblib|dill)\.loads?\(|\bjoblib/|\btorch\.load\(",
        "unpickles all objects for each sample",
        f"unpickle once and keep arrays or tensors; for files, {_MAPPED} (tensors: torch.load(path, mmap=True))",
    ),
    CostlyCall(
        r"^(?!\S*collate).*(\btransformers/tokenization|\b(tokenizers|sentencepiece|tiktoken)/"
        r"|\b(tok|\w*[tT]okenizer)(\.(encode|tokenize)\w*)?\()",
        "tokenizes one text at a time",
        "give the tokenizer a list of texts, before the training (datasets.map(batched=True)) or in the collate_fn, so "
        "that a fast one uses several CPUs",
    ),
    CostlyCall(
        r"\b(gzip|bz2|lzma|zipfile|tarfile)\.py|\b(gzip|bz2|lzma|zlib)\.\w+\(",
        "decompresses for each sample",
        "unpack it once, or compress it by a fast method (lz4, zstd)",
    ),
    CostlyCall(
        r"\b(requests|urllib3?|http|botocore|boto3|aiohttp|httpx|fsspec|s3fs|gcsfs)/",
        "asks over the network for each sample, and waits for the answer",
        "have more workers than CPUs, fetch several samples at once, or copy the data to a disk of this machine first",
    ),
)


def costly_call(line: HotLine) -> CostlyCall | None:
    """The table's entry for a line of the fetching, or None."""
    text = f"{line.function} {line.inside or ''} {line.call or ''}"
    return next((entry for entry in COSTLY_CALLS if re.search(entry.pattern, text)), None)


# --------------------------------------------------------------------------- without a DataLoader

SLOW_ENVIRONMENT = (
    "the environment is slow: step several at once, each in a process (stable-baselines3: make_vec_env(..., n_envs=8, "
    "vec_env_cls=SubprocVecEnv); gymnasium: AsyncVectorEnv; torchrl: ParallelEnv)"
)


def steps_an_environment(line: HotLine) -> bool:
    """Whether this is reinforcement learning's ``step``: in a job without a loader, which makes its own experience."""
    inside = re.search(r"\._?step(\.<locals>.*)?$", line.function)
    return inside is not None or re.search(r"env\w*\.step\(", line.call or "") is not None


# For libraries that training draws from without a DataLoader: how to make several batches while the training runs.
WITHOUT_LOADER = {
    "torchdata": "ParallelMapper(node, fn, num_workers={}) instead of Mapper, and Prefetcher(node, 2) as the last node",
    "datasets": "draw from torch.utils.data.DataLoader(dataset, batch_size=..., num_workers={})",
    "ray": "iter_torch_batches(..., prefetch_batches={}), and CPUs that the workers leave to Ray Data's own tasks",
    "webdataset": "draw from webdataset.WebLoader(dataset, batch_size=None, num_workers={})",
}


def beside_training(loader: LoaderRecord, workers: int) -> str | None:
    """How to make batches in the background with a library that needs no DataLoader; None for a DataLoader."""
    words = WITHOUT_LOADER.get(loader.made_by or "") if not loader.given else None
    return words.format(workers) if words else None


# Streamed data sets that give each worker its own part.
_DIVIDE_THEMSELVES = (
    *("WebDataset", "WebLoader", "DataPipeline", "StreamingDataset", "CombinedStreamingDataset"),
    "IterableDataset",  # of Hugging Face
)


def divides_itself(loader: LoaderRecord) -> bool:
    """Whether the samples of an iterable data set are known to be divided among its workers."""
    return loader.dataset in _DIVIDE_THEMSELVES or loader.made_by in LIBRARIES
