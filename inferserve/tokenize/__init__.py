"""Tokenizers and chat templates without torch: text to ids, ids to bytes."""
