"""The training loop: epochs, steps, evaluation and checkpoints in order.

Between two checkpoints nothing waits for the device, except to read figures that are some steps old.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from fulltilt.errors import Diverged, FulltiltError, MachineError, StoppedEarly, UsageError
from fulltilt.train import config, train_state
from fulltilt.train.build import build, enter_stage, learning_rate_of, resume
from fulltilt.train.checkpoint import HostMemory, Snapshot, newest_complete
from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import StepData, split_batch, to_device
from fulltilt.train.distributed import Group, Piece
from fulltilt.train.guards import RankDoesNotFit, StepFigures, explain_dead_worker, is_out_of_memory
from fulltilt.train.job import Job, plain_metrics, value_and_means
from fulltilt.train.metrics import AsyncMetrics, EpochTotals
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.record import TrainingRecord, profiled_steps
from fulltilt.train.stop import StopRequest, Watchdog
from fulltilt.train.train_state import Hook, Outcome, StepEnd, TrainState


def train(
    job: Job,
    settings: TrainSettings,
    out: Path | str,
    *,
    resume_from: Path | str | None = None,
    fresh: bool = False,
    screen: TrainingScreen | None = None,
    on_step: Hook | None = None,
) -> Outcome:
    """Train ``job`` into ``out``, resuming from its newest checkpoint unless ``fresh``.

    Raises StoppedEarly after a signal or at the time limit, with everything saved; other FulltiltErrors as documented.
    """
    began_ns = time.perf_counter_ns()
    if job.stages:  # they have the number of epochs
        settings = replace(settings, epochs=sum(stage.epochs for stage in job.stages))
    settings, out = config.checked(settings), Path(out)
    stop = StopRequest(settings.max_time_s)
    with stop.listening(), contextlib.ExitStack() as cleanup:
        state = build(job, settings, out, cleanup, screen)
        watchdog = Watchdog(settings.hang_timeout_s, out / f"stacks.rank-{state.group.info.rank}.log")
        cleanup.callback(state.writer.finish)
        cleanup.enter_context(state.screen)
        cleanup.enter_context(watchdog)
        resume(state, resume_from=None if resume_from is None else Path(resume_from), fresh=fresh)
        loop = Loop(state, stop, watchdog, TrainingRecord(state, began_ns), on_step)
        if loop.steps_left:  # a finished run keeps its record
            cleanup.enter_context(loop.record)
            loop.profile_step = cleanup.enter_context(profiled_steps(state, loop.record))
        return loop.run()


class Loop:
    """One run over its state."""

    def __init__(
        self, state: TrainState, stop: StopRequest, watchdog: Watchdog, record: TrainingRecord, on_step: Hook | None
    ) -> None:
        self.state, self.stop, self.watchdog, self.record, self.on_step = state, stop, watchdog, record, on_step
        state.stepper.marks = record
        self.profile_step: Callable[[], None] = lambda: None
        self.readout: AsyncMetrics[tuple[int, int, Callable[[], str]]] = AsyncMetrics(state.device)
        self._memory = HostMemory()
        # Step and epoch of the newest checkpoint, or of the one being written.
        self._saved_at: tuple[int, int] | None = self._here() if state.progress.step else None
        self.metrics: dict[str, float] = {}

    @property
    def steps_left(self) -> bool:
        """Whether anything is left to train."""
        return self.state.progress.epoch < self.state.settings.epochs and not self._steps_used_up()

    def run(self) -> Outcome:
        """Train to the end."""
        state, progress = self.state, self.state.progress
        state.screen.begin(state.settings, state.stepper.precision, state.gpu_names())
        if not self.steps_left:
            state.screen.say(f"Nothing is left to train: step {progress.step} is done already; --fresh starts again")
        try:
            while self.steps_left:
                self._epoch()
        except RuntimeError as error:
            # torch raises the death of a worker anywhere on the training thread, also within a step.
            explained = explain_dead_worker(error)
            if explained is None:
                raise
            raise explained from error
        with self.record.checkpoint():
            self._wait_for_disk()
        best, newest = state.history.best, state.writer.newest
        return Outcome(progress.step, progress.epoch, self.metrics, best, newest, state.guard.skipped)

    # ----------------------------------------------------------------------- an epoch

    def _epoch(self) -> None:
        state, progress = self.state, self.state.progress
        enter_stage(state, progress.epoch)
        state.model.train()
        asked = state.stages[state.stage_index].batch_size or state.settings.batch_size
        done = state.source.steps_done(progress.consumed)
        most = state.settings.max_steps
        left = None if most is None else most - progress.step
        state.screen.epoch_begins(progress.epoch, state.source.steps_per_epoch(), done, asked, left)
        self.record.mark_epoch(progress.epoch)
        steps = state.source.steps(progress.epoch, progress.consumed)
        begins = progress.consumed == 0
        while not self._steps_used_up():
            self.watchdog.beat(f"waiting for the data of step {progress.step + 1}")
            began = time.perf_counter()
            try:
                data = next(steps, None)
            except MachineError:
                if self.stop.reason is None or not state.group.alone:
                    raise
                self._stop_here()  # the workers got the same signal as we did
            if data is None:
                if begins and progress.consumed == 0:
                    what = f"the data gave no batch in epoch {progress.epoch + 1}"
                    remedy = "A generator can be used only once: give an object whose iter() starts again."
                    raise UsageError(what, remedy)
                break
            self._step(data, time.perf_counter() - began)
        self._end_epoch(cut_short=self._steps_used_up())

    def _step(self, data: StepData, wait_s: float) -> None:
        state, progress = self.state, self.state.progress
        number = progress.step + 1
        self.watchdog.beat(f"in step {number}")
        rate = learning_rate_of(state)
        for group in state.stepper.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        state.stepper.stop_flag = float(self.stop.reason is not None)
        figures = state.stepper.step(data.batches, data.samples, number, state.totals)
        state.screen.stepped(data.samples, len(data.batches), wait_s)
        progress.step = number
        progress.consumed = data.consumed
        self.readout.push((number, data.samples, data.names), figures)  # without the batches, which would stay alive
        self._judge()
        if self.on_step is not None:
            self.on_step(StepEnd(number, progress.epoch, state, data.names))
        self.profile_step()
        self._between_steps()

    def _between_steps(self) -> None:
        """After a step: raise an error of the writer, stop, save, compare the ranks' weights."""
        state, settings = self.state, self.state.settings
        state.writer.check()
        self.stop.step_done(state.writer.longest_save_s)
        if state.stepper.stop_agreed or (state.group.alone and self.stop.reason):
            self._stop_here()
        if settings.save_every and state.progress.step % settings.save_every == 0:
            self._save()
        if settings.drift_every and state.progress.step % settings.drift_every == 0:
            state.check_drift()

    def _end_epoch(self, *, cut_short: bool) -> None:
        """Evaluate and save. After max_steps too, where a longer run resumes within the epoch."""
        state, progress = self.state, self.state.progress
        self._judge(everything=True)
        state.screen.epoch_trained()
        self.metrics = {f"train_{name}": value for name, value in state.totals.means().items()}
        metric = None
        number = progress.epoch + 1
        due = cut_short or number == state.settings.epochs or number % state.settings.eval_every == 0
        if state.eval_source is not None and due:
            found = self._evaluate()
            self.metrics.update({f"eval_{name}": value for name, value in found.items()})
            metric = watched(state, found)
        state.screen.epoch_ends(progress.epoch, self.metrics)
        if metric is not None and state.settings.target is not None:
            state.screen.outlook(state.history.values, state.settings.target, state.settings.monitor_mode)
        if not cut_short:
            state.totals.reset()
            progress.epoch += 1
            progress.consumed = 0
        self._save(metric)

    def _evaluate(self) -> dict[str, float]:
        """The metrics. The state is saved when the evaluation fails or is stopped; a resume repeats it."""
        state = self.state
        with self.record.checkpoint():
            saved = self._saved_at == self._here()
            before = None if saved or state.stepper.placement.lockstep else self._freeze()
        ema = state.stepper.ema
        averaged = ema.applied(state.model) if ema is not None else contextlib.nullcontext()
        try:
            with self.record.validation():
                state.share_buffers()
                with averaged:
                    found = evaluate(state, self.watchdog.beat, lambda: self.stop.wanted(state.writer.longest_save_s))
        except Exception:
            if before is not None:
                with contextlib.suppress(FulltiltError):  # the first error is raised
                    state.writer.save(before, background=False)
            raise
        if found is None:
            self._stop_here()
        if not found:
            state.screen.warn("eval_data gave no batch, so nothing was evaluated")
        self.stop.pause_done()
        return found

    def _steps_used_up(self) -> bool:
        most = self.state.settings.max_steps
        return most is not None and self.state.progress.step >= most

    # ----------------------------------------------------------------------- guards

    def _judge(self, *, everything: bool = False) -> None:
        state = self.state
        for (number, samples, names), (loss, norm, bad, scale) in self.readout.read(everything=everything):
            figures = StepFigures(number, loss, norm, bool(bad), scale if state.stepper.scale.active else None)
            state.totals.add_read("loss", loss, samples)
            state.screen.step(figures, samples)
            judged = state.guard.judge(figures)
            if judged.why is not None:
                state.screen.warn(f"{judged.why}; {names()}")
            if judged.action == "stop":
                self._wait_for_disk()
                remedy = "Lower lr, lengthen the warm-up, set clip_norm, or look at the samples named above."
                raise Diverged(f"{judged.why}; {state.guard.rollbacks} rollbacks done", remedy)
            if judged.action == "rollback":
                self._roll_back(judged.why or "")
                return

    def _roll_back(self, why: str) -> None:
        """Load the weights of the last checkpoint and go on after the data that led here."""
        state = self.state
        self._wait_for_disk()
        state.group.barrier()
        # The first rank chooses for all, as in `resume`.
        found = state.group.gather(newest_complete(state.root).checkpoint if state.group.first else None)[0]
        if found is None:
            if broken := state.broken_weights():
                raise Diverged(f"{why}; the weights themselves are not finite: {broken}", "Look where they come from.")
            raise Diverged(f"{why}; there is no checkpoint to go back to", "Lower lr, or save earlier with save_every.")
        parts = {name: part for name, part in state.parts().items() if name in train_state.WEIGHT_PARTS}
        train_state.restore(found.folder, state.model, parts, state.load(found.folder))
        self.readout.clear()
        state.screen.warn(f"rolled back to the weights of {found.folder.name}; going on with the data that follows")

    # ----------------------------------------------------------------------- saving

    def _save(self, metric: float | None = None, *, background: bool = True) -> None:
        """Save the state unless it is saved already without a ``metric``. All ranks take part."""
        self._judge(everything=True)
        with self.record.checkpoint():
            self._wait_for_disk()
            if self._saved_at != self._here() or metric is not None:
                snapshot = self._freeze(metric)
                if snapshot is not None:
                    self.state.writer.save(snapshot, background=background)
                self._saved_at = self._here()
            self.stop.pause_done()

    def _freeze(self, metric: float | None = None) -> Snapshot | None:
        """The state as it is now, for the writer; None on ranks that have nothing to write.

        Raises Diverged for weights that are not finite: the checkpoint before is better.
        """
        state = self.state
        broken = state.broken_weights()
        if state.group.agree([broken is not None])[0]:
            what = f"the weights are no longer finite at step {state.progress.step}: {broken or 'on another rank'}"
            raise Diverged(what, "Lower lr, set clip_norm, or train in a wider precision.")
        self._wait_for_disk()  # a save under way reads the buffers that are used now
        self.watchdog.beat(f"saving step {state.progress.step}")
        state.share_buffers()
        return train_state.freeze(state, metric, self._memory)

    def _wait_for_disk(self) -> None:
        self.watchdog.beat("waiting for the disk")
        self.state.writer.wait()

    def _here(self) -> tuple[int, int]:
        return self.state.progress.step, self.state.progress.epoch

    def _stop_here(self) -> NoReturn:
        state = self.state
        self._save(background=False)
        self._wait_for_disk()
        state.group.barrier()  # a launcher ends all ranks when one is gone, also one that still writes
        reason = self.stop.reason or "another rank was asked to stop"
        where = f"step {state.progress.step} is saved in {state.root}"
        raise StoppedEarly(f"stopped: {reason}; {where}", "Run the same command again to go on from there.")


# --------------------------------------------------------------------------- evaluation


def evaluate(
    state: TrainState, beat: Callable[[str], None], stopping: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """The metrics by name; ``loss`` is among them. A batch that does not fit is halved and done again.

    None when a rank was ``stopping``: it is asked before every batch.
    """
    assert state.eval_source is not None
    totals = EpochTotals(state.group)
    kept: list[Mapping[str, torch.Tensor]] = []
    was_training = state.model.training
    state.model.eval()
    try:
        # FSDP keeps the memory that it gathers into, and inference tensors could not be trained with.
        with torch.no_grad() if state.stepper.placement.lockstep else torch.inference_mode():
            for number, step in enumerate(state.eval_source.steps(0, 0)):
                beat(f"evaluating batch {number}")
                if any(state.group.agree([stopping()])):
                    return None
                for piece in step.batches or ((None,) if state.stepper.placement.lockstep else ()):
                    kept += _add(state, piece, totals)
    finally:
        state.model.train(was_training)
    means = totals.means()
    if state.job.eval_metrics is not None:
        beat("computing the metrics of the whole set")
        means.update(plain_metrics(state.job.eval_metrics(_joined(kept, state.group))))
    return means


def watched(state: TrainState, found: Mapping[str, float]) -> float | None:
    """The metric ``monitor``, added to the history; None and a warning where it was not measured.

    It may be misspelt, or undefined, such as AUROC over a single class.
    """
    name = state.settings.monitor
    if name is None:
        return None
    metric = found.get(name.removeprefix("eval_"))
    if metric is not None:
        state.history.values.append((state.progress.epoch, metric))
    elif found:
        hint = config.did_you_mean(name.removeprefix("eval_"), found)
        state.screen.warn(f"monitor: {name} was not measured, only {', '.join(found)}{hint}")
    return metric


def _joined(kept: list[Mapping[str, torch.Tensor]], group: Group) -> dict[str, torch.Tensor]:
    mine = {name: torch.cat([rows[name] for rows in kept]) for name in (kept[0] if kept else ())}
    if group.alone:
        return mine
    parts = [part for part in group.gather({name: rows.cpu() for name, rows in mine.items()}) if part]
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _add(state: TrainState, batch: Piece | None, totals: EpochTotals) -> list[Mapping[str, torch.Tensor]]:
    """Add a batch's means to ``totals`` and return the rows to keep. None: take part without a batch."""
    placement, loss = state.stepper.placement, state.job.eval_loss or state.job.loss
    while True:
        found: list[tuple[dict[str, torch.Tensor], int]] = []
        kept: list[Mapping[str, torch.Tensor]] = []
        running, failed_at = 0, 0
        try:
            own = [] if batch is None else list(split_batch(*batch, state.eval_micro.most))
            for piece, running in placement.pieces(own):
                on_device = to_device(piece, state.device, state.stepper.memory_format)
                with state.stepper.autocast():
                    outcome = placement.evaluate(loss, on_device)
                value, metrics, rows = value_and_means(outcome, state.device)
                if running:
                    found.append(({"loss": value, **metrics}, running))
                    kept += rows
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed_at = max(running, 1)
            if placement.lockstep:
                what = f"memory ran out in evaluation with {failed_at} samples at once"
                raise RankDoesNotFit(what, "Lower eval_batch_size; the run resumes.") from error
        if not failed_at:
            break
        state.stepper.make_room(state.eval_micro, failed_at, "evaluation")
    for means, count in found:
        totals.add(means, count)
    return kept
