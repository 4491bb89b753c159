"""Deterministic simulation of the pure rooms under seeded faults."""
