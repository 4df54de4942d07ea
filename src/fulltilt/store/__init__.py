"""The run folder: JSON lines appended, JSON written atomically, several ranks side by side.

    run.json              what ran, where and how it ended            (one writer: the launcher)
    rank-0.json           the record of rank 0, without its spans     (one writer: that rank)
    steps.jsonl           rank 0's spans; steps.rank-1.jsonl, …       (one writer each)
    samples.jsonl         what the machine did                        (one writer: the sampler)
    findings.json         the diagnosis                               (written at the end)
    report.html           the page                                    (written at the end)
    settings.json         what live tuning found, for --settings      (one writer: rank 0)
    live.GROUP.jsonl      what the ranks agreed on; live.GROUP.rank-0.jsonl, … what they reported   (one writer each)

Each task of a job over several nodes or tasks has such a folder inside the job's, and ``load`` reads them as one run.
There each process of a rank has files of its own: rank-3.json, then rank-3.1.json after a restart.

A line is complete with its newline. A kill can only tear the last line, which reading drops. Any other damage is an
error that names the file and the line.
"""

# Each name is imported as itself, which says that it is exported.
from fulltilt.store.join_tasks import load as load
from fulltilt.store.join_tasks import newest_run as newest_run
from fulltilt.store.join_tasks import run_name as run_name
from fulltilt.store.join_tasks import wait_for_tasks as wait_for_tasks
from fulltilt.store.owned_folder import OwnedFolder as OwnedFolder
from fulltilt.store.owned_folder import open_plain as open_plain
from fulltilt.store.record_json import decode as decode
from fulltilt.store.record_json import encode as encode
from fulltilt.store.run_folder import FINDINGS_FILE as FINDINGS_FILE
from fulltilt.store.run_folder import LIVE as LIVE
from fulltilt.store.run_folder import REPORT_FILE as REPORT_FILE
from fulltilt.store.run_folder import RUN_FILE as RUN_FILE
from fulltilt.store.run_folder import SAMPLES_FILE as SAMPLES_FILE
from fulltilt.store.run_folder import SETTINGS_FILE as SETTINGS_FILE
from fulltilt.store.run_folder import LineWriter as LineWriter
from fulltilt.store.run_folder import claim_file as claim_file
from fulltilt.store.run_folder import create_folder as create_folder
from fulltilt.store.run_folder import create_new_folder as create_new_folder
from fulltilt.store.run_folder import create_task_folder as create_task_folder
from fulltilt.store.run_folder import is_task as is_task
from fulltilt.store.run_folder import move_earlier_run as move_earlier_run
from fulltilt.store.run_folder import parse_json as parse_json
from fulltilt.store.run_folder import rank_file as rank_file
from fulltilt.store.run_folder import rank_parts as rank_parts
from fulltilt.store.run_folder import read_json as read_json
from fulltilt.store.run_folder import read_lines as read_lines
from fulltilt.store.run_folder import read_new_lines as read_new_lines
from fulltilt.store.run_folder import read_ranks as read_ranks
from fulltilt.store.run_folder import read_record as read_record
from fulltilt.store.run_folder import steps_file as steps_file
from fulltilt.store.run_folder import write_json as write_json
from fulltilt.store.run_folder import write_text as write_text
