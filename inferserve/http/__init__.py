"""The HTTP process: validate, tokenize, take slots, stream."""
