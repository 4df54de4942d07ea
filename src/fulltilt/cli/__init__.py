"""The command line: one file a verb. Nothing imports this floor."""
