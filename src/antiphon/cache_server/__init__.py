"""The shell that drives the pure cache: sockets, arena, admin HTTP."""
