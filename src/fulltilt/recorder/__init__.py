"""Where a step's time goes: marks on the training thread, a clock on the GPU, taps on loaders and workers."""
