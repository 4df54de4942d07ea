"""Where a step's time goes: marks on the training thread, a clock on the GPU, timers in loaders and workers."""
