"""Metric names, a cheap client for every process, and the process that owns the Prometheus registry."""
