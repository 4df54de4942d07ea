"""The rows of bench/recipes.py, one file each: ``run(bench)`` notes what it measures under the names of its columns."""
