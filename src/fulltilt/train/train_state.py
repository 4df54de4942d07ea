"""The state of a training: named parts with a state_dict, copied into one snapshot for a checkpoint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.distributed.tensor import DTensor

from fulltilt.errors import FulltiltError, MachineError, UsageError
from fulltilt.figures import listed
from fulltilt.train import checkpoint, checkpoint_format
from fulltilt.train.checkpoint import Checkpoint, DamagedCheckpoint, HostMemory, Snapshot, Writer
from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import Source
from fulltilt.train.distributed import bit_hash, local_shard, sharded_like
from fulltilt.train.guards import Guard, MicroBatch, SavedAttributes
from fulltilt.train.job import Job, Stage, samples_in
from fulltilt.train.metrics import EpochTotals
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.random_states import RandomStates
from fulltilt.train.step import Stepper
from fulltilt.train.weight_import import WeightMatch, compare

# Restored by a rollback; the rest (progress, guard) goes on.
WEIGHT_PARTS = ("optimizer", "ema", "loss_scale")


class Stateful(Protocol):
    """An object whose state is saved in the checkpoint."""

    def state_dict(self) -> Any: ...  # noqa: D102
    def load_state_dict(self, state: Any, /) -> Any: ...  # noqa: D102


@dataclass
class Progress(SavedAttributes):
    """Where the run is. ``consumed`` is the position in the epoch up to which it has trained, not fetched."""

    kept = ("step", "epoch", "consumed")
    step: int = 0
    epoch: int = 0
    consumed: int = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. Raises ValueError for anything but counts."""
        if any(type(state[name]) is not int or state[name] < 0 for name in self.kept):
            raise ValueError
        super().load_state_dict(state)


class MetricHistory(SavedAttributes):
    """The metric ``monitor`` after each evaluation, with its epoch."""

    kept = ("values",)

    def __init__(self, mode: Literal["max", "min"]) -> None:
        self.mode = mode
        self.values: list[tuple[int, float]] = []

    @property
    def best(self) -> float | None:
        """The best value so far, NaN left out."""
        values = [value for _, value in self.values if not math.isnan(value)]
        return (max if self.mode == "max" else min)(values, default=None)


class KeptSettings:
    """The settings and the number of samples; a resume reports what has changed since the checkpoint."""

    def __init__(self, settings: TrainSettings, job: Job) -> None:
        samples = samples_in(job.data)
        self.now = {**asdict(settings), **job.made_from, **({} if samples is None else {"samples": samples})}
        self.before: dict[str, Any] = {}

    @property
    def changed(self) -> list[str]:
        """The settings that differ from the checkpoint's."""
        return [name for name in self.now if name in self.before and self.before[name] != self.now[name]]

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self.now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint, to compare with."""
        self.before = state


class OptimizerState:
    """An optimizer whose moments go by the names of their parameters, and are sharded as these are."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        kept: KeptSettings,
        warn: Callable[[str], None],
    ) -> None:
        self.optimizer, self._model, self._kept, self._warn = optimizer, model, kept, warn

    @property
    def _names(self) -> list[list[str]]:
        """The parameters of each group. Of several names the first by alphabet, whatever the order in the model."""
        named = sorted(self._model.named_parameters(remove_duplicate=False), reverse=True)
        known = {id(p): name for name, p in named}
        number = itertools.count()
        groups = self.optimizer.param_groups
        return [[known.get(id(p)) or f"unnamed {next(number)}" for p in group["params"]] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        kind = type(self.optimizer).__name__
        return {"kind": kind, "param_names": self._names, **self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint; with a warning, nothing is taken from another kind of optimizer."""
        own = type(self.optimizer).__name__
        kind = state.get("kind", own)
        groups = self.optimizer.param_groups
        matched = _matched(state, self._names) if kind == own else None
        if matched is None:
            what = f"of {kind}, not {own}" if kind != own else _other_parameters(state, self._names)
            self._warn(f"the optimizer starts from nothing: the checkpoint's is {what}")
            return
        places = [place for group in matched for place in group["params"]]
        parameters = dict(zip(places, (p for group in groups for p in group["params"]), strict=True))
        # Flags such as fused and amsgrad stay the job's, since they decide what state there is; so do settings that
        # were changed since the checkpoint.
        ours = {"lr_factor", "param_names", *{"weight_decay", "momentum"}.intersection(self._kept.changed)}
        own_values = [{k: v for k, v in group.items() if k in ours or isinstance(v, bool)} for group in groups]
        entries = {
            index: {name: _as_parameter(name, value, parameters[index]) for name, value in entry.items()}
            for index, entry in state["state"].items()
            if index in parameters
        }
        of_torch = type(self.optimizer).__module__.startswith("torch.optim")
        if of_torch and len({frozenset(entry) for entry in entries.values() if entry}) > 1:
            raise ValueError("some parameters have less state than others")
        saved = [{**own, **group} for own, group in zip(groups, matched, strict=True)]
        self.optimizer.load_state_dict({"param_groups": saved, "state": entries})
        for group, values in zip(self.optimizer.param_groups, own_values, strict=True):
            group.update(values)


def _matched(state: dict[str, Any], names: list[list[str]]) -> list[dict[str, Any]] | None:
    """The checkpoint's groups in the order of ``names``, or in its own if it has none; None if they do not fit."""
    groups: list[dict[str, Any]] = state["param_groups"]
    if "param_names" not in state:
        return groups if [len(group["params"]) for group in groups] == list(map(len, names)) else None
    saved = zip(state["param_names"], groups, strict=True)
    left = [(dict(zip(named, group["params"], strict=True)), group) for named, group in saved]
    matched = []
    for wanted in names:
        at = next((at for at, (places, _) in enumerate(left) if places.keys() == set(wanted)), None)
        if at is None:
            return None
        places, group = left.pop(at)
        matched.append({**group, "params": [places[name] for name in wanted]})
    return None if left else matched


def _other_parameters(state: dict[str, Any], names: list[list[str]]) -> str:
    saved, own = set(itertools.chain(*state.get("param_names", names))), set(itertools.chain(*names))
    lines = WeightMatch("", (), tuple(sorted(own - saved)), tuple(sorted(saved - own)), ()).lines(3)[1:]
    return f"for other parameters: {'; '.join(lines)}" if lines else "for other groups of parameters"


# Of torch's optimizers; others keep moments in other forms.
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def _as_parameter(name: str, value: Any, parameter: torch.Tensor) -> Any:
    moment = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    if not moment and name in _MOMENTS:
        raise ValueError(f"{name} is not of its parameter's shape")
    return sharded_like(value, parameter) if moment else value


def freeze(state: TrainState, metric: float | None, memory: HostMemory) -> Snapshot | None:
    """A snapshot on the host that later steps cannot change; None on ranks that have nothing to write.

    The first rank writes everything, with FSDP the others their shards. All ranks take part. Waits for the device.
    """
    weights = state.model.state_dict()
    values, tensors = state.flattened()
    mesh = state.writer.mesh
    if not state.group.first:
        if mesh is None:
            return None
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    frozen = memory.freeze(weights, "model", mesh), memory.freeze(tensors, "state", mesh)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Snapshot(state.progress.step, state.progress.epoch, metric, *frozen, values)


def _fits(saved: Any, own: Any) -> bool:
    """Whether a saved value has the type of the part's own; torch takes any, and fails in the next step."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(_fits(saved[key], own[key]) for key in own if key in saved)
    if isinstance(own, tuple | list):
        same = isinstance(saved, tuple | list) and (isinstance(own, list) or len(saved) == len(own))
        return same and all(map(_fits, saved, own))
    if isinstance(own, int | float):
        return saved is None or isinstance(saved, int | float | torch.Tensor)
    return True


def restore(folder: Path, model: torch.nn.Module, parts: dict[str, Stateful], loaded: Any) -> None:
    """Load every part from a checkpoint; ``loaded`` is what ``checkpoint.load`` returned.

    Raises DamagedCheckpoint when it lacks a part, UsageError listing the keys when it is of another model.
    """
    weights, state = loaded
    missing = [name for name in parts if name not in state]
    if missing:
        raise DamagedCheckpoint(
            f"{folder} lacks {', '.join(missing)}", "Take its weights alone with --resume-from, or start with --fresh."
        )
    own = model.state_dict()
    fit = compare(own, weights, str(folder))
    if not fit.complete:
        remedy = "Give the settings of that model, another --out, or --fresh."
        raise UsageError(f"this is the checkpoint of another model: {'; '.join(fit.lines(3))}", remedy)
    model.load_state_dict({name: sharded_like(tensor, own[name]) for name, tensor in weights.items()})
    for name, part in parts.items():
        take_over(folder, name, part, state)


def take_over(folder: Path, name: str, part: Stateful, state: Any) -> None:
    """Load one part from the checkpoint's ``state``. Raises DamagedCheckpoint."""
    try:
        if name != "settings" and not _fits(state[name], part.state_dict()):
            raise TypeError
        part.load_state_dict(state[name])
    except FulltiltError:
        raise
    except Exception as error:  # a damaged value may raise anything
        raise DamagedCheckpoint(
            f"{folder}: its {name} cannot be taken over ({type(error).__name__})",
            "Take its weights alone with --resume-from, or start with --fresh.",
        ) from error


def expected_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, averaged: bool) -> int:
    """The approximate size of a checkpoint, before the optimizer has a state. Raises UsageError for weights that no
    checkpoint can hold.
    """
    weights = model.state_dict()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"cannot save {name} of the model: {kind} is not an ordinary tensor",
                "Leave it out of the model's state_dict().",
            )
    trained: int = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    moments = 1 if isinstance(optimizer, torch.optim.SGD) else 2
    return checkpoint_format.tensor_bytes(weights) + trained * moments + (trained if averaged else 0) + 2**16


# --------------------------------------------------------------------------- the state


class TrainState:
    """Everything that a run works with. The stepper's optimizer changes with the stage."""

    def __init__(
        self,
        job: Job,
        settings: TrainSettings,
        out: Path,
        stepper: Stepper,
        source: Source,
        eval_source: Source | None,
        writer: Writer,
        screen: TrainingScreen,
    ) -> None:
        self.job, self.settings, self.out, self.screen = job, settings, out, screen
        self.stepper, self.source, self.eval_source, self.writer = stepper, source, eval_source, writer
        self.model, self.group, self.device, self.root = job.model, stepper.group, stepper.group.device, writer.root
        self.stages = job.stages or (Stage("training", settings.epochs),)
        self.eval_micro = MicroBatch(splittable=job.splittable)
        self.totals = EpochTotals(self.group)
        self.guard = Guard(settings)
        self.history = MetricHistory(settings.monitor_mode)
        self.progress = Progress()
        self.kept_settings = KeptSettings(settings, job)
        self.stage_index = -1
        self.initially_frozen = frozenset(name for name, p in job.model.named_parameters() if not p.requires_grad)
        self.trained: frozenset[str] | None = None

    def gpu_names(self) -> list[str]:
        """The names of all ranks' GPUs, the first rank's first; none on the CPU."""
        if self.device.type != "cuda":
            return []
        return [str(name) for name in self.group.gather(torch.cuda.get_device_name(self.device))]

    def parts(self) -> dict[str, Stateful]:
        """The parts of a checkpoint besides the model."""
        parts: dict[str, Stateful] = {
            "progress": self.progress,
            "settings": self.kept_settings,  # before the optimizer, which goes by what has changed
            "optimizer": OptimizerState(self.stepper.optimizer, self.model, self.kept_settings, self.screen.warn),
            "loss_scale": self.stepper.scale,
            "random": RandomStates(self.group),
            "totals": self.totals,
            "guard": self.guard,
            "micro_batch": self.stepper.micro,
            "eval_micro_batch": self.eval_micro,
            "history": self.history,
        }
        if self.stepper.ema is not None:
            parts["ema"] = self.stepper.ema
        return parts

    def flattened(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The parts as plain values and tensors; all ranks take part. Raises UsageError for what cannot be saved."""
        return checkpoint_format.flatten_state({name: part.state_dict() for name, part in self.parts().items()})

    def load(self, folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
        """See ``checkpoint.load``."""
        return checkpoint.load(folder, self.model.state_dict(), self.group.info)

    def unfreeze(self) -> None:
        """Freeze the parameters that the job itself froze, and no others: another call may train the model."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in self.initially_frozen)

    def share_buffers(self) -> None:
        """Copy the first rank's buffers to every rank: running statistics differ between ranks."""
        self.group.copy_from_first(list(self.model.buffers()))

    def broken_weights(self) -> str | None:
        """The names of the first trained parameters that are not finite. Waits for the device."""
        local = [(name, local_shard(p.detach())) for name, p in self.model.named_parameters() if p.requires_grad]
        named = [(name, tensor) for name, tensor in local if tensor.numel()]  # a shard may be empty
        largest = torch._foreach_norm([tensor for _, tensor in named], math.inf)  # which does not overflow
        norms = torch.stack([one.float() for one in largest] or [torch.zeros(())])
        names = [name for (name, _), whole in zip(named, torch.isfinite(norms).tolist(), strict=False) if not whole]
        return listed(names, 3) if names else None

    def check_drift(self) -> None:
        """Raise MachineError when the ranks' weights differ in any bit, by a hash. Waits for the device."""
        if self.group.alone or self.stepper.placement.lockstep:
            return
        own = float(bit_hash(list(self.model.parameters())))
        largest, smallest = self.group.agree([own, -own])
        if largest != -smallest:
            raise MachineError(
                f"the ranks' weights differ at step {self.progress.step}: one GPU computed wrongly",
                "Resume from the last checkpoint, and have that machine's memory checked.",
            )


# --------------------------------------------------------------------------- returned to callers


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: its steps, its last metrics, its newest checkpoint."""

    steps: int
    epochs: int
    metrics: dict[str, float]
    best: float | None
    checkpoint: Checkpoint | None
    skipped_steps: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step hook gets: the state after the step."""

    step: int
    epoch: int
    state: TrainState
    names: Callable[[], str]

    @property
    def samples(self) -> str:
        """The names of its samples, made on demand."""
        return self.names()


Hook = Callable[[StepEnd], None]
