"""Movers of messages and bytes between processes."""
