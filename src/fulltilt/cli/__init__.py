"""The command line: one file for each command. No other package imports this one."""
