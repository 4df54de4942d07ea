"""A GPU check: `python scripts/check_gpu_utilization.py`. It is `fulltilt check`, with a line on memory.

The peak is the highest of the readings taken here within two seconds; a training job's own peak is in its report.
"""

import sys
import time

try:
    from fulltilt.cli.main import main
    from fulltilt.probes.gpu import Gpus
    from fulltilt.report.status_line import memory_line
except ImportError:
    sys.exit("Fulltilt is not installed in this Python. From the folder above: pip install .")

READINGS, PAUSE_S = 10, 0.2


def print_memory() -> None:
    with Gpus.open() as gpus:
        peaks: dict[str, int] = {}
        for number in range(READINGS):
            readings = gpus.read()
            for gpu in readings:
                peaks[gpu.uuid] = max(peaks.get(gpu.uuid, 0), gpu.vram_used_bytes or 0)
            if not readings:
                return
            time.sleep(PAUSE_S if number < READINGS - 1 else 0)
        for gpu in readings:
            if gpu.vram_used_bytes is not None:
                print(f"GPU {gpu.index}: {gpu.name}")
                print(memory_line(gpu.vram_used_bytes, peaks[gpu.uuid]))


if __name__ == "__main__":
    if not {"--json", "--help"} & set(sys.argv):
        print_memory()
    main(["check", *sys.argv[1:]])
