"""From a run to the next one: memory by part, other GPUs, the loader's RAM, learning rates, time to a target."""
