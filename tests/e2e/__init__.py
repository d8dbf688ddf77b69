"""The real server, all processes, real clients."""
