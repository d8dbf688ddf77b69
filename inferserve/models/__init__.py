"""One decoder stack, one short file a family, weight tables, and the generic transformers backend."""
