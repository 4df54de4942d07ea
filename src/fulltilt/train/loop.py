"""The loop: epochs, steps, evaluation and checkpoints in order; what each of them does stands in its own file.

Nothing here waits for the device between two checkpoints except to read figures that are some steps old.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from fulltilt.errors import Diverged, FulltiltError, MachineError, StoppedEarly, UsageError
from fulltilt.train import config, find, state, workers
from fulltilt.train.evaluate import evaluate, watched
from fulltilt.train.guard import StepFigures
from fulltilt.train.job import Job
from fulltilt.train.machine import MachineWatch
from fulltilt.train.outcome import Hook, Outcome, StepEnd
from fulltilt.train.profiling import StepProfiler
from fulltilt.train.progress import Screen
from fulltilt.train.readout import Readout
from fulltilt.train.record import TrainingRecord
from fulltilt.train.resume import resume
from fulltilt.train.rig import Rig
from fulltilt.train.saving import Saving
from fulltilt.train.settings import TrainSettings
from fulltilt.train.setup import rig_up
from fulltilt.train.sources import StepData
from fulltilt.train.staging import enter_stage, learning_rate_of
from fulltilt.train.stop import StopRequest
from fulltilt.train.watchdog import Watchdog


def train(
    job: Job,
    settings: TrainSettings,
    out: Path | str,
    *,
    resume_from: Path | str | None = None,
    fresh: bool = False,
    screen: Screen | None = None,
    on_step: Hook | None = None,
) -> Outcome:
    """Train ``job`` into ``out``, going on from its newest checkpoint unless ``fresh``.

    Raises StoppedEarly after a signal or at the time limit, with everything saved; other FulltiltErrors as documented.
    """
    began_ns = time.perf_counter_ns()
    if job.stages:  # they say how long
        settings = replace(settings, epochs=sum(stage.epochs for stage in job.stages))
    settings, out = config.checked(settings), Path(out)
    stop = StopRequest(settings.max_time_s)
    with stop.listening(), contextlib.ExitStack() as cleanup:
        rig = rig_up(job, settings, out, screen)
        cleanup.push(lambda kind, _error, _trace: rig.close(failed=kind not in (None, StoppedEarly)))
        watchdog = Watchdog(settings.hang_timeout_s, out / f"stacks.rank-{rig.group.ranks.rank}.log")
        cleanup.callback(rig.writer.finish)
        cleanup.enter_context(rig.screen)
        cleanup.enter_context(watchdog)
        resume(rig, resume_from=None if resume_from is None else Path(resume_from), fresh=fresh)
        watch = MachineWatch(began_ns)
        loop = Loop(rig, stop, watchdog, TrainingRecord(rig, began_ns, watch), on_step)
        if loop.steps_left:  # a run that was done already keeps the record that it has
            cleanup.enter_context(loop.record)
            cleanup.enter_context(watch)
            cleanup.enter_context(loop.profiler)
        return loop.run()


class Loop:
    """One run over its rig."""

    def __init__(
        self, rig: Rig, stop: StopRequest, watchdog: Watchdog, record: TrainingRecord, on_step: Hook | None
    ) -> None:
        self.rig, self.stop, self.watchdog, self.record, self.on_step = rig, stop, watchdog, record, on_step
        rig.stepper.marks = record
        rank = rig.group.ranks.rank
        self.profiler = StepProfiler(rig.settings.profile_steps, rig.out, rank, rig.screen, record)
        self.readout: Readout[tuple[int, StepData]] = Readout(rig.device)
        self.saving = Saving(rig, watchdog)
        self.metrics: dict[str, float] = {}

    @property
    def steps_left(self) -> bool:
        """Whether anything is left to train."""
        return self.rig.progress.epoch < self.rig.epochs and not self._steps_used_up()

    def run(self) -> Outcome:
        """Train to the end."""
        rig, progress = self.rig, self.rig.progress
        rig.screen.begin(rig.job.name, rig.settings, rig.precision.name, rig.epochs, rig.gpu_names())
        if not self.steps_left:
            rig.screen.say(f"Nothing is left to train: step {progress.step} is done already; --fresh begins anew")
        around = workers.look()
        try:
            while self.steps_left:
                self._epoch()
        except RuntimeError as error:
            # torch raises the death of a worker wherever the training thread stands, also in the middle of a step.
            explained = workers.explain(error, around, workers.look()) if "DataLoader worker" in str(error) else None
            if explained is None:
                raise
            raise explained from error
        with self.record.checkpoint():
            self.saving.wait_for_disk()
        rig.screen.end(self.metrics)
        best, newest = rig.history.best, rig.writer.newest
        return Outcome(progress.step, progress.epoch, self.metrics, best, newest, rig.guard.skipped)

    # ----------------------------------------------------------------------- an epoch

    def _epoch(self) -> None:
        rig, progress = self.rig, self.rig.progress
        enter_stage(rig, progress.epoch)
        rig.model.train()
        asked = rig.stages[rig.stage_index].batch_size or rig.settings.batch_size
        done = rig.source.steps_done(progress.consumed)
        most = rig.settings.max_steps
        left = None if most is None else most - progress.step
        rig.screen.epoch_begins(progress.epoch, rig.source.steps_per_epoch(), done, asked, left)
        self.record.mark_epoch(progress.epoch)
        steps = self.record.steps(rig.source.steps(progress.epoch, progress.consumed))
        begins = progress.consumed == 0
        while not self._steps_used_up():
            self.watchdog.beat(f"waiting for the data of step {progress.step + 1}")
            began = time.perf_counter()
            try:
                data = next(steps, None)
            except MachineError:
                if self.stop.reason is None or not rig.group.alone:
                    raise
                self._stop_here()  # the workers got the same signal as we did; the last step is whole
            if data is None:
                if begins and progress.consumed == 0:
                    raise _no_batch(progress.epoch)
                break
            rig.screen.loaded(time.perf_counter() - began, len(data.batches))
            self._step(data)
        self._end_epoch(cut_short=self._steps_used_up())

    def _step(self, data: StepData) -> None:
        rig, progress = self.rig, self.rig.progress
        number = progress.step + 1
        self.watchdog.beat(f"in step {number}")
        for group in rig.stepper.optimizer.param_groups:
            group["lr"] = learning_rate_of(rig) * group.get("lr_factor", 1.0)
        rig.stepper.wish = float(self.stop.reason is not None)
        figures = rig.stepper.step(data.batches, data.samples, number, rig.totals)
        rig.screen.stepped(data.samples, len(data.batches))
        progress.step = number
        progress.consumed = data.consumed
        progress.samples += data.samples
        self.readout.push((number, data), figures)
        self._judge()
        if self.on_step is not None:
            self.on_step(StepEnd(number, progress.epoch, rig, data.names))
        self.profiler.step(number)
        self._between_steps()

    def _between_steps(self) -> None:
        """What may follow a step: an error of the writer, a stop, a save, a look at the other ranks' weights."""
        rig, settings = self.rig, self.rig.settings
        rig.writer.check()
        self.stop.step_done(rig.writer.longest_save_s)
        if rig.stepper.agreed_wish or (rig.group.alone and self.stop.reason):
            self._stop_here()
        if settings.save_every and rig.progress.step % settings.save_every == 0:
            self._save()
        if settings.drift_every and rig.progress.step % settings.drift_every == 0:
            rig.check_drift()

    def _end_epoch(self, *, cut_short: bool) -> None:
        """Evaluate and save. An epoch cut short by max_steps is evaluated too, but a longer run goes on within it."""
        rig, progress = self.rig, self.rig.progress
        self._judge(everything=True)
        rig.screen.epoch_trained()
        self.metrics = {f"train_{name}": value for name, value in rig.totals.means(rig.group).items()}
        metric = None
        number = progress.epoch + 1
        due = cut_short or number == rig.epochs or number % rig.settings.eval_every == 0
        if rig.eval_source is not None and due:
            found = self._evaluate()
            self.metrics.update({f"eval_{name}": value for name, value in found.items()})
            metric = watched(rig, found)
        rig.screen.epoch_ends(progress.epoch, self.metrics)
        if metric is not None and rig.settings.target is not None:
            rig.screen.outlook(rig.history.values, rig.settings.target, rig.settings.monitor_mode)
        if not cut_short:
            rig.totals.reset()
            progress.epoch += 1
            progress.consumed = 0
        self._save(metric)

    def _evaluate(self) -> dict[str, float]:
        """The metrics. An evaluation that fails or is to stop loses no step: it is done again after a resume."""
        rig = self.rig
        with self.record.checkpoint():
            before = None if self.saving.up_to_date or rig.stepper.placement.lockstep else self.saving.freeze()
        averaged = rig.ema.applied(rig.model) if rig.ema is not None else contextlib.nullcontext()
        try:
            with self.record.validation():
                rig.share_buffers()
                with averaged:
                    found = evaluate(rig, self.watchdog.beat, self._wants_to_stop)
        except Exception:
            if before is not None:
                with contextlib.suppress(FulltiltError):  # what went wrong first is told
                    rig.writer.save(before, background=False)
            raise
        if found is None:
            self._stop_here()
        if not found:
            rig.screen.warn("eval_data gave no batch, so nothing was evaluated")
        self.stop.pause_done()
        return found

    def _wants_to_stop(self) -> bool:
        return self.stop.wanted(self.rig.writer.longest_save_s)

    def _steps_used_up(self) -> bool:
        most = self.rig.settings.max_steps
        return most is not None and self.rig.progress.step >= most

    # ----------------------------------------------------------------------- the guard's verdicts

    def _judge(self, *, everything: bool = False) -> None:
        rig = self.rig
        for (number, data), (loss, norm, bad, scale) in self.readout.drain() if everything else self.readout.due():
            figures = StepFigures(number, loss, norm, bool(bad), scale if rig.scale.active else None)
            rig.totals.add_read("loss", loss, data.samples)
            rig.screen.step(figures, data.samples)
            verdict = rig.guard.judge(figures)
            if verdict.why is not None:
                rig.screen.warn(f"{verdict.why}; {data.names()}")
            if verdict.action == "stop":
                self.saving.wait_for_disk()
                remedy = "Lower lr, lengthen the warm-up, set clip_norm, or look at the samples named above."
                raise Diverged(f"{verdict.why}; {rig.guard.rollbacks} rollbacks done", remedy)
            if verdict.action == "rollback":
                self._roll_back(verdict.why or "")
                return

    def _roll_back(self, why: str) -> None:
        """Take the weights of the last checkpoint and go on behind the data that led here."""
        rig = self.rig
        self.saving.wait_for_disk()
        rig.group.barrier()
        found = find.newest_complete(rig.root).checkpoint
        if found is None:
            if broken := rig.broken_weights():
                raise Diverged(f"{why}; the weights themselves are not finite: {broken}", "Look where they come from.")
            raise Diverged(f"{why}; there is no checkpoint to go back to", "Lower lr, or save earlier with save_every.")
        parts = {name: part for name, part in rig.parts().items() if name in state.WEIGHT_PARTS}
        state.restore(found.folder, rig.model, parts)
        self.readout.clear()
        rig.screen.warn(f"went back to the weights of {found.folder.name}; going on after the present data")

    # ----------------------------------------------------------------------- saving

    def _save(self, metric: float | None = None, *, background: bool = True) -> None:
        self._judge(everything=True)
        with self.record.checkpoint():
            self.saving.save(metric, background=background)
            self.stop.pause_done()

    def _stop_here(self) -> NoReturn:
        rig = self.rig
        self._save(background=False)
        self.saving.wait_for_disk()
        rig.group.barrier()  # a launcher that sees one rank gone ends the others, also one that still writes
        reason = self.stop.reason or "another rank was asked to stop"
        where = f"step {rig.progress.step} is saved in {rig.root}"
        raise StoppedEarly(f"stopped: {reason}; {where}", "Run the same command again to go on from there.")


def _no_batch(epoch: int) -> UsageError:
    return UsageError(
        f"the data gave no batch in epoch {epoch + 1}",
        "If it can be gone through only once (a generator), give an object whose iter() begins anew.",
    )
