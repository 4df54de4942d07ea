"""The engine: loop, precision, distributed, checkpoint, guard, schedule, progress, forecast."""
