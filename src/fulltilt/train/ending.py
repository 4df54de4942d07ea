"""How a run ends for its user: an exit code, at most three lines, and the traceback in a log file only."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch.distributed as dist

from fulltilt import store
from fulltilt.errors import Diverged, DoesNotFit, FulltiltError, MachineError, StoppedEarly, UsageError, refused_path
from fulltilt.train import checkpoint, durable, find
from fulltilt.train.distributed import Ranks, detect, lost_contact
from fulltilt.train.step import RankDoesNotFit
from fulltilt.train.stop import was_interrupted

INTERRUPTED = 130
_OUTSIDE = "interrupted before or after training; no step is lost"
LOST = MachineError.exit_code
# A rank that lost another waits so long: the launcher should see first how that one ended, and ends us then.
_AFTER_YOU_S = 5.0
# What all ranks meet together; the first one says it.
_SHARED = (StoppedEarly, Diverged, DoesNotFit)


def exit_code_of(body: Callable[[], object], out: Path, stream: TextIO | None = None) -> int:
    """Run ``body`` and return the exit code of the run in ``out``; errors are told in at most three lines."""
    ranks = detect()
    silent = False
    try:
        body()
    except FulltiltError as error:
        lines = [error.what, error.remedy or ""]
        code = error.exit_code
        silent = _told_by_another(error, ranks)
        # What was refused before the run had a folder leaves none behind: the lines say all of it.
        if not isinstance(error, StoppedEarly) and out.is_dir():
            _log_traceback(out)
    except KeyboardInterrupt as error:
        # The first one while it trains is a request to stop, which saves; only the second comes here, with a word.
        lines = ["interrupted a second time; the last step was not saved" if error.args else _OUTSIDE]
        code = INTERRUPTED
    except Exception as error:  # the user's own code, or a bug of ours: the log has the details
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        log = _log_traceback(out, elsewhere=True)
        lines, code = [f"{said} (in {_place(error)}; all of it is in {log})"], 1
        refusal = refused_path(error) or durable.refused_write(error, out)
        if refusal is not None:
            lines, code = [refusal.what, refusal.remedy or ""], refusal.exit_code
        if ranks.world > 1 and lost_contact(error):
            lines, code = ["lost contact with another rank", f"Look for what that one said. Ours is in {log}."], LOST
            time.sleep(_AFTER_YOU_S)
        if was_interrupted():  # what was being imported is left half done, and fails whoever comes next
            lines, code = [_OUTSIDE], INTERRUPTED
    else:
        return 0
    if silent:
        return code  # together with the others
    told = [line.replace(":\n", ": ").replace("\n", "; ") for line in lines if line]
    if ranks.rank:
        told[0] = f"rank {ranks.rank}: {told[0]}"
    resumable, goes_on = _newest(out)
    if resumable is not None:
        # After a refusal the same command would be refused again.
        again = "; the same command resumes there" if goes_on and code != UsageError.exit_code else ""
        told.append(f"Newest checkpoint: {resumable}{again}.")
    print(f"fulltilt: {told[0]}", *(f"  {line}" for line in told[1:]), sep="\n", file=stream or sys.stderr, flush=True)
    if ranks.world > 1 and dist.is_initialized():
        # NCCL was left as it is (see Group.close), and the interpreter's own end would wait for it.
        sys.stdout.flush()
        os._exit(code)
    return code


def _told_by_another(error: FulltiltError, ranks: Ranks) -> bool:
    """A wrong setting is told once on each machine, since the machines may differ."""
    if isinstance(error, UsageError):
        return ranks.local_rank > 0
    return isinstance(error, _SHARED) and not isinstance(error, RankDoesNotFit) and ranks.rank > 0


def _newest(out: Path) -> tuple[Path | None, bool]:
    """The newest checkpoint that is whole, and whether a run that goes on takes it.

    It does not where a later one needs a newer Fulltilt: that is refused, not passed over.
    """
    root = out / "checkpoints"
    with contextlib.suppress(OSError):  # what keeps us out of the folder has been told
        try:
            found = find.newest_complete(root).checkpoint
            return (None if found is None else found.folder), True
        except FulltiltError:
            for folder in checkpoint.folders(root):
                with contextlib.suppress(FulltiltError):
                    return checkpoint.verify(folder).folder, False
    return None, False


def _log_traceback(out: Path, *, elsewhere: bool = False) -> Path | None:
    """Append it to ``error.log`` in ``out``, or to one in a new temporary folder where ``out`` is not ours."""
    path = out / "error.log"
    with contextlib.suppress(OSError, FulltiltError):
        if (folder := store.OwnedFolder.around(path)) is not None:
            with os.fdopen(folder.append(path), "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            return path
    if elsewhere:
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="fulltilt-")) / "error.log"
            path.write_text(traceback.format_exc(), encoding="utf-8")
            return path
    return None


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
