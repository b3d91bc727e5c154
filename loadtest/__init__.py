"""Benchmarks: each ends with one JSON line; none decides a test."""
