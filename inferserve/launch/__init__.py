"""The launcher: CLI, process table, supervision, shutdown. Imports no process and no torch."""
