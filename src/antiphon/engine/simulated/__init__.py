"""The simulated engine: a process that speaks a vLLM engine's HTTP API, and whose tokens prove its KV.

Pure part, which also runs inside a simulation: ``tokenizer``, ``kv``, ``sequence``, ``machine``, ``requests``,
``responses``, ``metrics``, ``faults``. The process around it: ``side_channel``, ``driver``, ``generation``, ``server``.
The latency model is in ``machine``; docs/simulated-engine.md tells how to use it.
"""
