"""Other trainers: their callbacks become marks of a recording."""
