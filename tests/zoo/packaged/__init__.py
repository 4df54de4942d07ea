"""A training job that is started as a module."""
