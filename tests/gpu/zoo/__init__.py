"""Jobs of the zoo that need a GPU."""
