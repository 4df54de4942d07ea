"""One trial: started in isolation, measured from inside, and judged by its outcome."""
