"""``antiphon sim-engine``: run one simulated engine in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

from typing import Any

import click

from antiphon.cli.flags import FlagsCommand, model_from_flags, spec_options
from antiphon.cli.serving import Listener, raise_descriptor_limit, refusals, refuse_one_port_twice
from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.core.ids import new_incarnation
from antiphon.engine.simulated.cache_kv import CacheOptions
from antiphon.engine.simulated.kv_events import KvEventsOptions
from antiphon.engine.simulated.machine import EngineOptions
from antiphon.engine.simulated.server import ServerOptions, serve
from antiphon.transport.loop import run

_WILDCARDS = ("0.0.0.0", "::", "")
_PORT = click.IntRange(0, 65535)


@click.command(name="sim-engine", cls=FlagsCommand)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the HTTP API listens on.")
@click.option("--port", type=_PORT, default=0, help="Port of the HTTP API. [default: any free one]")
@click.option("--role", type=click.Choice(["prefill", "decode"]), default="decode", show_default=True, help="Its pool.")
@click.option("--model-name", default="simulated", show_default=True, help="Served model name; part of its KV.")
@click.option("--engine-id", help="Names this life of the engine in a hand-over. [default: a new one]")
@click.option("--side-channel-host", help="Address of the side channel. [default: --host, or 127.0.0.1 for a wildcard]")
@click.option("--side-channel-port", type=_PORT, default=0, help="Port of the side channel. [default: any free one]")
@click.option("--max-num-seqs", type=click.IntRange(min=1), default=256, show_default=True, help="Requests at once.")
@click.option(
    "--kv-load-failure-policy",
    type=click.Choice(["fail", "recompute"]),
    default="fail",
    show_default=True,
    help="What happens to a request whose KV cannot be pulled.",
)
@click.option("--kv-events-endpoint", help="Listener that hears of its KV blocks: tcp://HOST:PORT. [default: nobody]")
@click.option("--kv-events-topic", default="", help="What its messages begin with; the router knows it by that.")
@click.option("--kv-events-replay-endpoint", default="", help="Where it sends missed messages again: tcp://HOST:PORT.")
@click.option("--cache-port", type=_PORT, help="Port of its cache server, to hand KV over through. [default: none]")
@click.option(
    "--cache-chunk-size", type=click.IntRange(min=1), default=256, show_default=True, help="Its --chunk-size."
)
@spec_options(SimulatedSpec)
def sim_engine(host: str, port: int, role: str, model_name: str, **rest: Any) -> None:
    """Run a simulated engine: vLLM's API, a stated latency model, and tokens that prove the KV."""
    engine_id = rest.pop("engine_id") or f"{role}-{new_incarnation()}"
    side_channel_host = rest.pop("side_channel_host") or ("127.0.0.1" if host in _WILDCARDS else host)
    side_channel_port = rest.pop("side_channel_port")
    max_num_seqs, load_failure = rest.pop("max_num_seqs"), rest.pop("kv_load_failure_policy")
    told = rest.pop("kv_events_endpoint"), rest.pop("kv_events_topic"), rest.pop("kv_events_replay_endpoint")
    cache_port, chunk_size = rest.pop("cache_port"), rest.pop("cache_chunk_size")
    spec = model_from_flags(SimulatedSpec, rest)
    if cache_port is not None and chunk_size % spec.block_size_tokens:
        message = f"a chunk of {chunk_size} tokens is not made of whole blocks of {spec.block_size_tokens}"
        raise click.BadParameter(message, param_hint="--cache-chunk-size")
    options = ServerOptions(
        engine=EngineOptions(spec, model_name, max_num_seqs, load_failure),
        engine_id=engine_id,
        role=role,
        host=host,
        port=port,
        side_channel_host=side_channel_host,
        side_channel_port=side_channel_port,
        kv_events=KvEventsOptions(*told) if told[0] else None,
        cache=CacheOptions(cache_port, chunk_size) if cache_port is not None else None,
    )
    refuse_one_port_twice(
        (Listener("--port", host, port), Listener("--side-channel-port", side_channel_host, side_channel_port))
    )
    raise_descriptor_limit()
    with refusals("sim-engine"):
        run(serve(options, click.echo))
