"""Experts of mixture models, loaded when rows are routed to them."""
