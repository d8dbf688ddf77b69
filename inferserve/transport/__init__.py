"""Typed channels between processes: ZMQ inboxes and outboxes, and the control socket to the launcher."""
