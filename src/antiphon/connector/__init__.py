"""What runs inside vLLM's processes. The only room that touches vLLM."""
