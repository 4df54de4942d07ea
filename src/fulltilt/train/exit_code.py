"""The end of a training: an exit code, at most three lines of error, the traceback in error.log."""

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

from fulltilt.errors import Diverged, DoesNotFit, FulltiltError, MachineError, StoppedEarly, UsageError, refused_path
from fulltilt.records.secrets import mask_text
from fulltilt.train import checkpoint, checkpoint_format
from fulltilt.train.distributed import RankInfo, lost_contact, rank_from_env
from fulltilt.train.guards import RankDoesNotFit
from fulltilt.train.stop import INTERRUPTED, opened_log

# So long a rank that lost another one waits, for the launcher to see the exit code of that one first.
_LOST_CONTACT_WAIT_S = 5.0


def exit_code_of(body: Callable[[], object], out: Path, stream: TextIO | None = None) -> int:
    """Run ``body`` and return the exit code of the run in ``out``; errors are printed in at most three lines."""
    info = rank_from_env()
    try:
        body()
        return 0
    except FulltiltError as error:
        lines, code = [error.what, error.remedy or ""], error.exit_code
        # A run that was refused before it had a folder gets none.
        if not isinstance(error, StoppedEarly) and out.is_dir():
            _log_traceback(out)
        if _told_by_another(error, info):
            return code
    except KeyboardInterrupt as error:
        # During training the first Ctrl-C asks to stop and saves; only the second comes here, with an argument.
        again = "interrupted a second time; the last step was not saved"
        lines = [again if error.args else "interrupted before or after training; no step is lost"]
        code = INTERRUPTED
    except Exception as error:  # the user's own code, or a bug in Fulltilt
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        log = _log_traceback(out, elsewhere=True)
        lines, code = [f"{said} (in {_place_of(error)}; all of it is in {log})"], 1
        refusal = refused_path(error) or checkpoint_format.refused_write(error, out)
        if refusal is not None:
            lines, code = [refusal.what, refusal.remedy or ""], refusal.exit_code
        if info.world_size > 1 and lost_contact(error):
            lines = ["lost contact with another rank", f"See the error of that rank. The one of this rank is in {log}."]
            code = MachineError.exit_code
            time.sleep(_LOST_CONTACT_WAIT_S)
    told = [line.replace(":\n", ": ").replace("\n", "; ") for line in lines if line]
    if info.rank:
        told[0] = f"rank {info.rank}: {told[0]}"
    with contextlib.suppress(OSError, FulltiltError):  # reported above
        # By its manifest: after a signal there is no time to read all of it.
        for found in checkpoint.described(out / "checkpoints")[:1]:
            again = "" if code == UsageError.exit_code else "; the same command resumes there"
            told.append(f"Newest checkpoint: {found.folder}{again}.")
    print(f"fulltilt: {told[0]}", *(f"  {line}" for line in told[1:]), sep="\n", file=stream or sys.stderr, flush=True)
    if info.world_size > 1 and dist.is_initialized():
        # After a failure NCCL is still there (see Group.close), and the interpreter's end would wait for it.
        sys.stdout.flush()
        os._exit(code)
    return code


def _told_by_another(error: FulltiltError, info: RankInfo) -> bool:
    """Whether another rank prints this error: rank 0 for all, and for wrong settings one rank on each machine."""
    if isinstance(error, UsageError):
        return info.local_rank > 0
    shared = isinstance(error, StoppedEarly | Diverged | DoesNotFit) and not isinstance(error, RankDoesNotFit)
    return shared and info.rank > 0


def _log_traceback(out: Path, *, elsewhere: bool = False) -> Path | None:
    """Append the traceback to ``out/error.log``; if that is not ours and ``elsewhere``, to a temporary folder.

    It is masked: it shows lines of the user's code, which may hold a key.
    """
    text = "".join(mask_text(line) for line in traceback.format_exc().splitlines(keepends=True))
    path = out / "error.log"
    with contextlib.suppress(OSError, FulltiltError):
        with opened_log(path) as file:
            file.write(text)
        return path
    with contextlib.suppress(OSError):
        if elsewhere:
            path = Path(tempfile.mkdtemp(prefix="fulltilt-")) / "error.log"
            path.write_text(text, encoding="utf-8")
            return path
    return None


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
