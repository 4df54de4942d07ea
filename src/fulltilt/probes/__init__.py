"""What the machine does: GPUs through NVML, the host, its storage, and a sampler that takes them all."""
