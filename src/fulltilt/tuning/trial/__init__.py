"""One trial: started in isolation, measured from inside, and its end read."""
