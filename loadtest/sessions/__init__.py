"""Measures many sessions on one target: throughput, sharing, and what abandoned sessions leave behind."""
