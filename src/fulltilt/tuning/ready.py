"""How many batches lie ready behind a loader's iterator: what was made before its time says nothing of the pace."""

from __future__ import annotations

from typing import Any


def ready_batches(iterator: Any) -> int:
    """Batches that workers have made and nobody has taken yet; 0 without workers, and where nobody can tell.

    Uses of torch's iterator, the same from torch 2.8 to 2.15: ``_task_info`` (with the data of what came before its
    turn), ``_worker_result_queue``, and ``_data_queue``, which is another one where a thread pins.
    """
    try:
        before_their_turn = sum(len(task) > 1 for task in list(iterator._task_info.values()))
        queues = {id(queue): queue for queue in (iterator._worker_result_queue, iterator._data_queue)}
        return before_their_turn + sum(int(queue.qsize()) for queue in queues.values())
    except (
        AttributeError,
        NotImplementedError,
        OSError,
        RuntimeError,
    ):  # other iterators; macOS; a queue that is closed
        return 0
