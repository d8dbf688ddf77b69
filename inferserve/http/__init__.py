"""The HTTP process: OpenAI and native routes on the inherited socket; owns a range of slots and streams their text."""
