"""Blocks a decoder is made of: linear, norm, rotary, embedding, attention, mlp."""
