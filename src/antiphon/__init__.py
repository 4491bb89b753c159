"""Antiphon: prefill and decode on separate vLLM engines, with a receipt for every request.

The package is divided into rooms (see ``ARCHITECTURE.md``); nothing is imported here, so that a process loads only the
rooms that it needs.
"""

__version__ = "0.1.0"
