"""The run folder: JSON lines appended, JSON written atomically, several ranks side by side.

    run.json              what ran, where and how it ended            (one writer: the launcher)
    rank-0.json           what rank 0 knows besides its time          (one writer: that rank)
    steps.jsonl           rank 0's spans; steps.rank-1.jsonl, …       (one writer each)
    samples.jsonl         what the machine did                        (one writer: the sampler)
    findings.json         the diagnosis                               (written at the end)
    report.html           the page                                    (written at the end)
    settings.json         what live tuning found, for --settings      (one writer: rank 0)

A line is complete when its newline is there. A kill can only tear the last line, which reading drops.
A file that is damaged anywhere else is an error that names the file and the line: nothing is guessed.
"""

from __future__ import annotations

from fulltilt.store.owned_folder import OwnedFolder, open_plain, write_named_file
from fulltilt.store.record_json import decode, encode, encode_fully
from fulltilt.store.run_files import (
    FINDINGS_FILE,
    REPORT_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    SETTINGS_FILE,
    LineWriter,
    claim_file,
    create_folder,
    load,
    move_earlier_run,
    rank_file,
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
    "REPORT_FILE",
    "RUN_FILE",
    "SAMPLES_FILE",
    "SETTINGS_FILE",
    "LineWriter",
    "OwnedFolder",
    "claim_file",
    "create_folder",
    "decode",
    "encode",
    "encode_fully",
    "load",
    "move_earlier_run",
    "open_plain",
    "rank_file",
    "read_json",
    "read_lines",
    "read_new_lines",
    "read_ranks",
    "read_record",
    "steps_file",
    "write_json",
    "write_named_file",
    "write_text",
]
