"""Small training jobs with a known cause each: what `fulltilt run` says about them must be true."""
