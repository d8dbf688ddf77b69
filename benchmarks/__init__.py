"""Measurements; each writes one JSON file under results/."""
