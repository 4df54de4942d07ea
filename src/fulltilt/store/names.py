"""What the files of a run folder are called."""

from __future__ import annotations

RUN_FILE = "run.json"
SAMPLES_FILE = "samples.jsonl"
FINDINGS_FILE = "findings.json"
REPORT_FILE = "report.html"
SETTINGS_FILE = "settings.json"


def steps_file(rank: int) -> str:
    """The name of a rank's span file."""
    return "steps.jsonl" if rank == 0 else f"steps.rank-{rank}.jsonl"


def rank_file(rank: int) -> str:
    """The name of a rank's own record."""
    return f"rank-{rank}.json"


def claim_file(rank: int) -> str:
    """The name of the file by which a process claims a rank's two files."""
    return f".claim-{rank}"


# Everything that a run leaves in its folder. What makes it a run folder comes last: whoever is killed while moving
# them leaves a folder of which the next one still sees that there is something to move.
RUN_FILES = (
    *("rank-*.json", "steps*.jsonl", SAMPLES_FILE, FINDINGS_FILE, REPORT_FILE, SETTINGS_FILE, ".claim-*"),
    RUN_FILE,
)
