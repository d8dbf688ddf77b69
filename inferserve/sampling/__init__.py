"""Logits to tokens: bias, penalties, filters, seeded draws, logprobs."""
