"""Antiphon's tests, one folder a room. Helpers are imported by their full name: ``tests.<room>.<module>``."""
