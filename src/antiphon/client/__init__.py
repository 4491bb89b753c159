"""The connection to a cache server: calls, the mapped arena, reconnection."""
