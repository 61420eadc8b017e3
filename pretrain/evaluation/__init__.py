"""Benchmark tasks: requests to score, their metrics, and scoring at several loop counts from one pass."""
