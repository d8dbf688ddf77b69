"""Names and types of everything that crosses a process. Imports nothing of the package but `errors`."""
