"""Which optimizer calls make a step, and which batches went into it: pure bookkeeping over facts.

A step ends with an optimizer's step. Several optimizers in one iteration (a GAN) are one step: a new one begins when
a batch has been drawn since, or when an optimizer that already stepped steps again. Batches drawn but never trained
on (a sloppy validation loop, a prefetched batch before an early break) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A job that calls backward this often and never an optimizer updates its weights by hand.
BACKWARDS_WITHOUT_OPTIMIZER = 64


@dataclass
class Pending:
    """Batches of one loader that were drawn and not yet credited to a step."""

    batches: int = 0
    samples: int = 0
    counted: bool = True


@dataclass
class StepCounter:
    """Feeds on facts in order and says when a step begins and what it held."""

    pending: dict[int, Pending] = field(default_factory=dict)
    last_loader: int | None = None
    stepped: set[int] = field(default_factory=set)
    drawn_since_step: bool = False
    backwards: int = 0
    optimizer_seen: bool = False
    train_loaders: set[int] = field(default_factory=set)
    _batches: int = 0
    _samples: int = 0
    _counted: bool = False

    def batch(self, loader_id: int, samples: int | None, evaluating: bool) -> None:
        """A batch came out of a loader."""
        if evaluating:
            return
        waiting = self.pending.setdefault(loader_id, Pending())
        waiting.batches += 1
        if samples is None:
            waiting.counted = False
        else:
            waiting.samples += samples
        self.last_loader = loader_id
        self.drawn_since_step = True

    def pass_ended(self, loader_id: int, backwards_in_pass: int) -> None:
        """A loader is exhausted. A pass without any backward was not training: its batches are dropped."""
        if backwards_in_pass == 0 and loader_id not in self.train_loaders:
            self.pending.pop(loader_id, None)
            if self.last_loader == loader_id:
                self.last_loader = None

    def backward(self) -> None:
        """backward() ran: the batches drawn for it belong to the step under way."""
        self.backwards += 1
        if self.last_loader is None:
            return
        leading = self.pending.get(self.last_loader)
        # A second loader in the same iteration draws about as often as the one that was drawn last;
        # a loader that drew many batches without a backward was evaluating.
        most = (leading.batches if leading else 0) + 1
        used = [
            (loader_id, waiting)
            for loader_id, waiting in self.pending.items()
            if loader_id == self.last_loader or waiting.batches <= most
        ]
        self.train_loaders.update(loader_id for loader_id, _ in used)
        # Loaders drawn side by side serve the same iteration: the first one drawn counts its samples.
        _, first = used[0]
        self._batches += first.batches
        if first.counted:
            self._samples += first.samples
            self._counted = True
        self.pending.clear()
        self.last_loader = None

    def begins_new_step(self, optimizer_id: int) -> bool:
        """Whether this optimizer call belongs to a new step rather than to the one just ended."""
        return not self.stepped or optimizer_id in self.stepped or self.drawn_since_step

    def optimizer_stepped(self, optimizer_id: int) -> None:
        """An optimizer's step ended (also one that the scaler skipped)."""
        if self.begins_new_step(optimizer_id):
            self.stepped.clear()
        self.stepped.add(optimizer_id)
        self.optimizer_seen = True
        self.drawn_since_step = False

    def updates_by_hand(self) -> bool:
        """Whether this job never uses an optimizer, so that each backward counts as a step."""
        return not self.optimizer_seen and self.backwards >= BACKWARDS_WITHOUT_OPTIMIZER

    def take_counts(self) -> tuple[int, int | None]:
        """Batches and samples credited since the last call; samples are None when no loader could be counted."""
        batches, samples, counted = self._batches, self._samples, self._counted
        self._batches, self._samples, self._counted = 0, 0, False
        return batches, samples if counted else None
