"""Threads of ours in a job that captures a CUDA graph.

While a thread captures one in torch's usual mode, a query of an event or an allocation on any other thread ruins the
capture, unless that thread has set the thread-local capture mode.
"""

from __future__ import annotations

import ctypes
import sys

# Of cuda.h: CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CUDA_SUCCESS.
_THREAD_LOCAL, _SUCCESS = 1, 0


def use_thread_local_mode() -> bool:
    """Keep the calling thread from ruining captures of others. False: CUDA is not initialized yet, try again."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        exchange = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, or one older than CUDA 10.1
        return True
    return int(exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))) == _SUCCESS
