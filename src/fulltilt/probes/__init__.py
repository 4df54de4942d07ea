"""Readings of the machine: GPUs through NVML, the host, its storage, and a sampler that takes them every second."""
