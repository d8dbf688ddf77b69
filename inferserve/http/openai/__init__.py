"""The OpenAI-compatible routes: bodies to `GenerateRequest`s, pieces to chunks and answers."""
