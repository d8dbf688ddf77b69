"""The detokenize process: ids to text, stop strings."""
