"""The router process: who runs next."""
