"""Threads of ours beside a job that captures a CUDA graph.

While a thread captures one in torch's usual mode, CUDA forbids every other thread to ask for an event or to allocate,
unless that thread has said that it minds its own business; a call that is forbidden ruins the capture.
"""

from __future__ import annotations

import ctypes
import sys

# Of cuda.h: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CUDA_SUCCESS.
_THREAD_LOCAL, _SUCCESS = 1, 0


def use_thread_local_mode() -> bool:
    """Let the calling thread, one of ours, ruin no capture of another. False: CUDA has not begun here, ask again."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        exchange = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, or one older than CUDA 10.1
        return True
    return int(exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))) == _SUCCESS
