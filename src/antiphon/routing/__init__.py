"""Which engine serves a request, and along which path. Pure: no sockets, clocks, threads or randomness."""
