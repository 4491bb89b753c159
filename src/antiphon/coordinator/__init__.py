"""The coordinator: which cache servers are alive, and which holds what."""
