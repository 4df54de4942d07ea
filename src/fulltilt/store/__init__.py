"""The run folder: JSON lines appended, JSON written atomically, several ranks side by side.

    run.json              what ran, where and how it ended            (one writer: the launcher)
    rank-0.json           what rank 0 knows besides its time          (one writer: that rank)
    steps.jsonl           rank 0's spans; steps.rank-1.jsonl, …       (one writer each)
    samples.jsonl         what the machine did                        (one writer: the sampler)
    findings.json         the diagnosis                               (written at the end)
    report.html           the page                                    (written at the end)
    settings.json         what live tuning found, for --settings      (one writer: rank 0)
    live.GROUP.jsonl      what its ranks agreed on; live.GROUP.rank-0.jsonl, … what they reported   (one writer each)

Of a job over several nodes or tasks each has such a folder in the job's, and ``load`` reads them as one run. There each
process of a rank has files of its own: rank-3.json, then rank-3.1.json after a restart.

A line is complete when its newline is there. A kill can only tear the last line, which reading drops.
A file that is damaged anywhere else is an error that names the file and the line: nothing is guessed.
"""

from __future__ import annotations

from fulltilt.store.join_tasks import load, newest_run, run_name, tasks_in, wait_for_tasks
from fulltilt.store.owned_folder import OwnedFolder, open_plain, write_named_file
from fulltilt.store.record_json import decode, encode, encode_fully
from fulltilt.store.run_folder import (
    FINDINGS_FILE,
    LIVE,
    REPORT_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    LineWriter,
    claim_file,
    create_folder,
    create_task_folder,
    is_task,
    move_earlier_run,
    rank_file,
    rank_parts,
    read_json,
    read_lines,
    read_new_lines,
    read_ranks,
    read_record,
    steps_file,
    write_json,
    write_text,
)

__all__ = [
    "FINDINGS_FILE",
    "LIVE",
    "REPORT_FILE",
    "RUN_FILE",
    "SAMPLES_FILE",
    "SETTINGS_FILE",
    "LineWriter",
    "OwnedFolder",
    "claim_file",
    "create_folder",
    "create_task_folder",
    "decode",
    "encode",
    "encode_fully",
    "is_task",
    "load",
    "move_earlier_run",
    "newest_run",
    "open_plain",
    "rank_file",
    "rank_parts",
    "read_json",
    "read_lines",
    "read_new_lines",
    "read_ranks",
    "read_record",
    "run_name",
    "steps_file",
    "tasks_in",
    "wait_for_tasks",
    "write_json",
    "write_named_file",
    "write_text",
]
