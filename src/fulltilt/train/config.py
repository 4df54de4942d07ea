"""The training settings, and config files: every problem in one is listed at once, before any work is done."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge, gt, le
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fulltilt import store
from fulltilt.errors import UsageError
from fulltilt.figures import count, duration_s
from fulltilt.records import MOST_OF_A_SETTING


def option(
    default: Any,
    help: str | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field with bounds that ``parse`` checks; with ``help`` it is also a flag of `fulltilt train`."""
    return field(default=default, metadata={"help": help, "least": least, "above": above, "most": most})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train. Batch size and workers are totals over all ranks; times are seconds.

    Fields with a help text are flags of every recipe; the others can only be set in a config file.
    """

    # length
    epochs: int = option(1, "Number of passes over the training data.", least=1)
    max_steps: int | None = option(None, "Stop after this many optimizer steps.", least=1)
    max_time_s: float | None = option(None, "Time limit, such as 11h: save and stop before it.", above=0)
    # batches
    batch_size: int = option(32, "Samples per batch, over all GPUs.", least=1)
    eval_batch_size: int | None = option(None, least=1)
    accumulation: int = option(1, "Gradient accumulation: batches per optimizer step.", least=1)
    drop_last: bool = False
    seed: int = option(0, "Random seed of weights, shuffling and augmentation.", least=0, most=2**32 - 1)
    # optimizer
    optimizer: Literal["adamw", "adamw8bit", "adam", "sgd"] = option(
        "adamw", "Optimizer; the state of adamw8bit takes a quarter of the memory."
    )
    lr: float = option(1e-3, "Peak learning rate.", above=0)
    min_lr: float = option(0.0, "Learning rate at the end of the schedule.", least=0)
    weight_decay: float = option(0.01, least=0)
    momentum: float = option(0.9, least=0, most=1)
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "Learning-rate schedule after the warm-up.")
    warmup_epochs: float = option(0.0, "Epochs of linear learning-rate warm-up.", least=0)
    warmup_steps: int | None = option(None, least=0)
    clip_norm: float | None = option(None, above=0)
    ema_decay: float | None = option(None, above=0, most=1)
    # precision and execution
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Device to train on.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option("auto", "Precision (autocast) of forward and backward.")
    tf32: bool = True
    channels_last: bool = False
    compile: bool = option(False, "Compile the model with torch.compile.")
    cuda_graphs: bool = option(False, "Capture the model as CUDA graphs and replay them (one GPU).")
    gradient_checkpointing: bool = False
    deterministic: bool = False
    fsdp: bool = option(False, "Shard weights, gradients and optimizer state over the GPUs (FSDP2).")
    # data loading
    workers: int = option(0, "Data-loading workers, over all GPUs.", least=0)
    prefetch: int = option(2, least=1, most=MOST_OF_A_SETTING)
    residency: Literal["auto", "vram", "pinned", "ram", "disk", "none"] = option(
        "auto", "Memory that keeps the decoded data."
    )
    on_bad_sample: Literal["stop", "skip"] = "stop"
    max_bad_share: float = option(0.01, least=0, most=1)
    # checkpoints
    save_every: int | None = option(None, "Save a checkpoint every N steps, besides each epoch.", least=1)
    keep_last: int = option(2, least=1)
    keep_best: int = option(1, least=0)
    monitor: str | None = None
    monitor_mode: Literal["max", "min"] = "max"
    target: float | None = None
    # guards
    bad_steps_in_a_row: int = option(5, least=1)
    rollbacks: int = option(1, least=0)
    spike_factor: float | None = option(10.0, above=1)
    on_spike: Literal["report", "rollback"] = "report"
    loss_scale_floor: float = option(2.0**-10, above=0)
    hang_timeout_s: float = option(1800.0, above=0)
    drift_every: int | None = option(1000, least=1)
    # reporting
    eval_every: int = option(1, "Evaluate every N epochs, and after the last one.", least=1)
    record: bool = True
    profile_steps: int | None = option(None, least=1)

    def problems(self) -> list[str]:
        """Fields that are valid alone, but not together."""
        found = []
        world = os.environ.get("WORLD_SIZE", "")
        most_workers = MOST_OF_A_SETTING * (int(world) if world.isdecimal() else 1)
        if self.workers > most_workers:
            found.append(f"workers: should be at most {most_workers:,}, not {self.workers:,}")
        if self.min_lr > self.lr:
            found.append(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g})")
        if self.max_steps is None and self.warmup_epochs > self.epochs:
            found.append(f"warmup_epochs ({self.warmup_epochs:g}) is longer than the run ({self.epochs} epochs)")
        if self.warmup_steps is not None and self.warmup_epochs:
            found.append("give warmup_steps or warmup_epochs, not both")
        for name, refused in (("compile", True), ("channels_last", True), ("optimizer", "adamw8bit")):
            if self.fsdp and getattr(self, name) == refused:
                found.append(f"fsdp and {name}: {str(refused).lower()} do not go together")
        if self.on_spike == "rollback" and self.spike_factor is None:
            found.append("on_spike: rollback needs a spike_factor")
        if self.target is not None and self.monitor is None:
            found.append("target needs monitor: the name of the metric that is to reach it")
        if self.keep_best and self.monitor is None and self.monitor_mode == "min":
            found.append("monitor_mode: min needs monitor: the name of a metric")
        return found


# --------------------------------------------------------------------------- reading configs


Record = TypeVar("Record")

# A config is written by hand. A larger file is a mistake or an attack, and slow to parse as YAML.
MOST_CONFIG_BYTES = 256 * 1024
# For whole numbers without a bound of their own: fits the integers of torch and of file formats.
MOST_OF_ANYTHING = 2**31 - 1


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a config file. Raises UsageError for anything but a plain mapping."""
    try:
        with store.open_plain(path, follow=True) as file:
            raw = file.read(MOST_CONFIG_BYTES + 1)
        if len(raw) > MOST_CONFIG_BYTES:
            raise UsageError(f"{path} is too large: a config has at most {MOST_CONFIG_BYTES:,}")
        text = raw.decode("utf-8")
        if path.suffix in (".yaml", ".yml"):
            content = _read_yaml(text)
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        elif path.suffix == ".json":
            content = store.parse_json(text)
        else:
            raise UsageError(f"{path}: configs end in .yaml, .yml, .toml or .json")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        first = str(error).strip().splitlines() or ["too deeply nested"]
        raise UsageError(f"{path} is not a valid config: {first[0][:200]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} should hold names and values, not {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise UsageError(f"{path}: {_short(key)} is not the name of a setting")
    return content


def parse(given: Mapping[str, Any], record: type[Record], source: str = "settings") -> Record:
    """A frozen record from plain values. Unknown keys are refused; durations may be written as ``11h``."""
    made: Record = parse_together(given, (record,), source)[0]
    if hasattr(made, "problems"):
        refuse(made.problems(), source)
    return made


def parse_together(
    given: Mapping[str, Any],
    records: Sequence[type[Any]],
    source: str,
    *,
    problems: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> list[Any]:
    """A record of each type from plain values, of which each is a field of one of them. Their own problems are left.

    ``problems`` found before are reported with the others; ``names`` maps keys to the names that the user gave.
    """
    fields = {field.name: field for record in records for field in dataclasses.fields(record)}
    kinds = {name: kind for record in records for name, kind in get_type_hints(record).items()}
    found, values = [*problems], {}
    for key, value in given.items():
        if key not in fields:
            found.append(f"{_short(key)}: there is no such setting{did_you_mean(str(key).replace('-', '_'), fields)}")
            continue
        problem, values[key] = _converted(kinds[key], value, key, fields[key].metadata)
        if problem:
            found.append(f"{(names or {}).get(key, key)}: {problem}")
    refuse(found, source)
    return [
        record(**{field.name: values[field.name] for field in dataclasses.fields(record) if field.name in values})
        for record in records
    ]


def refuse(problems: Sequence[str], source: str) -> None:
    """Raise UsageError listing all problems, if there are any."""
    if problems:
        raise UsageError("\n".join([f"{count('problem', len(problems))} in {source}:", *problems]))


def checked(made: Record) -> Record:
    """A record made in code, checked as one from a file. Raises UsageError listing every problem."""
    given = {field.name: _plain(getattr(made, field.name)) for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    return parse(given, type(made))


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 else value


def did_you_mean(name: object, known: Iterable[str], most: int = 1) -> str:
    """``; did you mean cosine?`` where a known name is near ``name``, else nothing."""
    close = difflib.get_close_matches(str(name)[:80], known, n=most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _converted(kind: Any, value: Any, key: str, bounds: Mapping[str, Any]) -> tuple[str | None, Any]:
    """What is wrong with ``value``, or None and the value as the field wants it."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if value is None:
        return (None, None) if types.NoneType in options else ("should not be empty", None)
    wanted = next(option for option in options if option is not types.NoneType)
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        if isinstance(value, str) and value in choices:
            return None, value
        return f"should be one of {', '.join(choices)}, not {_short(value)}{did_you_mean(value, choices)}", None
    if wanted is float and key.endswith("_s") and isinstance(value, str):
        value = duration_s(value)
        if value is None:
            return "should be a duration such as 90s, 30m or 11h", None
    if wanted is float and type(value) is int:
        value = float(value) if abs(value) < 2**63 else math.inf
    if type(value) is not wanted:
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        return f"should be {names[wanted]}, not {_short(value)}", None
    return _out_of_bounds(value, bounds), value


def _out_of_bounds(value: Any, bounds: Mapping[str, Any]) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"should be a finite number, not {value}"
    own_most = bounds.get("most")
    most = MOST_OF_ANYTHING if own_most is None and type(value) is int else own_most
    for bound, words, holds in (
        (bounds.get("least"), "at least", ge),
        (bounds.get("above"), "above", gt),
        (most, "at most", le),
    ):
        if bound is not None and not holds(value, bound):
            told = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
            return f"should be {words} {told}, not {_short(value)}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_yaml(text: str) -> Any:
    if "[" * 99 in text or "{" * 99 in text:  # PyYAML would take seconds, and no config nests so deep
        raise ValueError("too deeply nested")
    try:
        import yaml
    except ImportError as error:
        remedy = "Install it with: pip install 'fulltilt[recipes]', or write the config as TOML or JSON."
        raise UsageError("reading YAML needs PyYAML", remedy) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Reads 2e-5 as a number (to YAML 1.1, without a dot it is text) and refuses duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            made = super().construct_mapping(node, deep)
            keys = set()
            for key, _ in node.value:
                if key.value in keys:
                    twice = f"the key {key.value!r} stands twice"
                    raise yaml.MarkedYAMLError(problem=twice, problem_mark=key.start_mark)
                keys.add(key.value)
            return made

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader)):
            raise ValueError("aliases (*name) are not allowed in a config")  # a few can expand to gigabytes
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or 'not YAML'}") from error
