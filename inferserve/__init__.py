"""inferserve: an LLM inference server. Start with ARCHITECTURE.md."""

__version__ = "0.1.0"
