"""The only code that knows shared-memory layout and lifetime. The launcher creates, everyone else attaches."""
