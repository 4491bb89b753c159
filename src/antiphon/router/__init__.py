"""The router's shell: an HTTP server that drives ``routing/``, the engines' connections, streaming."""
