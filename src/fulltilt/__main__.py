"""`python -m fulltilt` is `fulltilt`."""

from fulltilt.cli.main import main

main()
