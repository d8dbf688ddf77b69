"""The engine process: plan, forward, sample, commit."""
