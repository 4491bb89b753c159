"""Point 4: how fast chunks come out of paged KV into the arena and back, against the bus measured in the same run.

The connector's own copier and a real cache server, no engine: paged KV of the 8B shape, both layouts. First the kernel
is held against the plain reference on random bytes, and what comes back against what went out: before each store the
arena, before each load the target blocks are overwritten, so that only what was copied can be equal.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

from common import Report, median
from processes import Failed, Stack

LAYERS, HEADS, BLOCK, WIDTH, CHUNK = 32, 8, 16, 256, 256
NUM_BLOCKS = 12_000
SLAB_BYTES = LAYERS * CHUNK * WIDTH * 2
CHUNK_BYTES = HEADS * SLAB_BYTES
REPEATS = 7
BUS_BYTES = 1 << 30
PORT = 16_555
ARENA_GB = 12
LIMIT = 0.85


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    import torch

    from antiphon.connector.cuda_copy import CudaCopier
    from antiphon.connector.cuda_device import CudaPinDriver, TorchDevice, new_mover
    from antiphon.connector.cuda_paged import PagedKv, PlainMover
    from antiphon.connector.cuda_pinning import Pinning

    server = stack.cache_server(PORT, ARENA_GB)
    stack.wait_ready([server], "/status")
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    client, session = connected()
    pinning = Pinning(CudaPinDriver(device))
    pinning.begin()  # no engine captures graphs here
    pinning.add(session.arena)
    wait_pinned(report, pinning, session.arena)
    bus = bus_rates(torch, report, session.arena)
    for name in ("NHD", "HND"):
        paged = PagedKv(paged_tensors(torch, device, name), NUM_BLOCKS)
        mover, plain = new_mover(paged), PlainMover(paged)
        kind = type(mover).__name__
        report.note(f"mover {name}", kind, kind, "the Triton kernel", kind == "TritonMover")
        check_mover(torch, report, name, paged, (mover, plain))
        kernel_rates(torch, report, name, paged, (mover, plain))
        for number in (8, 32, 128):
            for kind, mine in (("", mover), (", plain PyTorch", plain)):
                copier = CudaCopier(paged, CHUNK // BLOCK, mine, TorchDevice(device), pinning)
                copies(torch, report, f"{name}, {number} chunks{kind}", copier, (session, number), bus)
                del copier
        del paged, mover, plain
        torch.cuda.empty_cache()
    client.close()


def connected() -> tuple[Any, Any]:
    """A client of the cache server as a worker has it, and its session."""
    from antiphon.client import CacheClient, ClientOptions
    from antiphon.core.chunks_layout import ChunkLayout

    options = ClientOptions(
        host="127.0.0.1", port=PORT, role="worker-0", engine="rates", incarnation="1", model="m",
        layout=ChunkLayout(HEADS, SLAB_BYTES), chunk_size_tokens=CHUNK, slabs=tuple(range(HEADS)), needs_arena=True,
    )  # fmt: skip
    client = CacheClient(options)
    client.start()
    if not client.wait_connected(10):
        raise Failed(f"no connection: {client.state}")
    return client, client.session


def paged_tensors(torch: Any, device: Any, name: str) -> list[Any]:
    """Random KV, an allocation a layer."""
    made = []
    for _ in range(LAYERS):
        shape = (NUM_BLOCKS, BLOCK, HEADS, WIDTH) if name == "NHD" else (NUM_BLOCKS, HEADS, BLOCK, WIDTH)
        raw = torch.randint(-(1 << 62), 1 << 62, (NUM_BLOCKS * HEADS * BLOCK * WIDTH // 4,), device=device)
        tensor = raw.view(torch.bfloat16).view(shape)
        made.append(tensor.permute(0, 2, 1, 3) if name == "NHD" else tensor)
    return made


def wait_pinned(report: Report, pinning: Any, arena: Any) -> None:
    """Until the arena is registered, which is timed."""
    began_s, until_s = time.monotonic(), time.monotonic() + 60
    while pinning.num_pinned_bytes < arena.data_bytes and time.monotonic() < until_s:
        time.sleep(0.05)
    took_s = time.monotonic() - began_s
    number = pinning.num_pinned_bytes
    report.note("arena registered, GB", number / 1e9, f"{number / 1e9:.1f} GB", f"= {arena.data_bytes / 1e9:.1f}",
                number >= arena.data_bytes)  # fmt: skip
    report.note("registered in, s", took_s, f"{took_s:.1f} s, with the server's population")


def timed_s(torch: Any, work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median seconds of GPU time, after one run that is not timed."""
    work()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / 1e3)
    return median(found)


def bus_rates(torch: Any, report: Report, arena: Any) -> dict[str, float]:
    """The rate of the bus, GB/s: plain copies between the registered arena and the GPU."""
    from antiphon.connector.cuda_pinning import PIECE_BYTES

    found = {}
    device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda").random_()
    pieces = [
        torch.frombuffer(
            (ctypes.c_ubyte * PIECE_BYTES).from_address(arena.address + n * PIECE_BYTES), dtype=torch.uint8
        )
        for n in range(BUS_BYTES // PIECE_BYTES)
    ]
    is_pinned = all(piece.is_pinned() for piece in pieces)
    report.note("arena is pinned for torch", is_pinned, str(is_pinned), is_met=is_pinned)

    def out() -> None:
        for piece in pieces:
            piece.copy_(device, non_blocking=True)

    def back() -> None:
        for piece in pieces:
            device.copy_(piece, non_blocking=True)

    for name, work in (("store", out), ("load", back)):
        found[name] = BUS_BYTES / timed_s(torch, work) / 1e9
        direction = "to the host" if name == "store" else "to the GPU"
        report.note(f"bus {direction}, GB/s", found[name], f"{found[name]:.1f} GB/s")
    return found


def check_mover(torch: Any, report: Report, name: str, paged: Any, movers: tuple[Any, Any]) -> None:
    """Kernel and reference do the same on random blocks, -1 among those of a scatter."""
    mover, plain = movers
    chance = random.Random(3)
    num = 5
    ids = torch.tensor(chance.sample(range(1, NUM_BLOCKS), num * CHUNK // BLOCK), device="cuda", dtype=torch.int32)
    blocks = ids.view(num, -1)
    one, other = (torch.empty(num * CHUNK_BYTES // 8, dtype=torch.int64, device="cuda").random_() for _ in range(2))
    mover.gather(paged.dense(one, num, CHUNK), blocks)
    plain.gather(paged.dense(other, num, CHUNK), blocks)
    is_equal = torch.equal(one, other)
    expected = paged.expected_slab(blocks[0].tolist())
    is_format = one[: CHUNK_BYTES // 8].cpu().numpy().tobytes() == expected
    fresh = torch.empty_like(one).random_()
    targets = blocks.clone()
    targets[0, :3] = -1
    targets[-1, 9:] = -1
    before = [layer.clone() for layer in paged.layers]
    mover.scatter(paged.dense(fresh, num, CHUNK), targets)
    found = [layer.clone() for layer in paged.layers]
    for layer, was in zip(paged.layers, before, strict=True):
        layer.copy_(was)
    plain.scatter(paged.dense(fresh, num, CHUNK), targets)
    is_scattered = all(torch.equal(layer, one) for layer, one in zip(paged.layers, found, strict=True))
    is_changed = not torch.equal(found[0], before[0])
    is_good = is_equal and is_format and is_scattered and is_changed
    report.note(f"kernel equals reference, {name}", is_good, str(is_good), is_met=is_good)


def kernel_rates(torch: Any, report: Report, name: str, paged: Any, movers: tuple[Any, Any]) -> None:
    """Gather and scatter alone, GB/s of KV (bytes read, or written, not both)."""
    num = 4
    blocks = torch.randperm(NUM_BLOCKS - 1, device="cuda")[: num * CHUNK // BLOCK].int().view(num, -1) + 1
    memory = torch.empty(num * CHUNK_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    dense = paged.dense(memory, num, CHUNK)
    for kind, mover in zip(("kernel", "plain PyTorch"), movers, strict=True):
        for action in ("gather", "scatter"):
            work = getattr(mover, action)
            rate = num * CHUNK_BYTES / timed_s(torch, lambda work=work: work(dense, blocks), 15) / 1e9
            report.note(f"{action} alone, {name}, {kind}, GB/s", rate, f"{rate:.0f} GB/s")


def copies(torch: Any, report: Report, name: str, copier: Any, where: tuple[Any, int], bus: dict[str, float]) -> None:
    """Stores and loads of so many chunks, wall time from beginning to the end of the copies, and host time of begin."""
    from antiphon.connector.copier import Part

    session, number = where
    per_chunk = CHUNK // BLOCK
    chance = random.Random(number)
    source = chance.sample(range(1, NUM_BLOCKS // 2), number * per_chunk)
    target = chance.sample(range(NUM_BLOCKS // 2, NUM_BLOCKS), number * per_chunk)
    at = [session.arena.address + place * CHUNK_BYTES for place in range(number)]
    parts = {
        "store": [Part(at[n], tuple(source[n * per_chunk : (n + 1) * per_chunk])) for n in range(number)],
        "load": [Part(at[n], tuple(target[n * per_chunk : (n + 1) * per_chunk])) for n in range(number)],
    }
    once = copier.num_chunks_at_once
    for kind in ("store", "load"):
        took_s, host_s = [], []
        if kind == "store":
            ctypes.memset(at[0], len(name) % 255 + 1, number * CHUNK_BYTES)
        else:
            for layer in copier._paged.layers:
                layer[torch.tensor(target, device="cuda")] = len(name)
        for _ in range(REPEATS + 1):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            if kind == "load":
                begun = [copier.begin_load(parts["load"], copier.mark())]
            else:
                batches = [parts["store"][first : first + once] for first in range(0, number, once)]
                begun = [copier.begin_store(batch, copier.mark()) for batch in batches]
            host_s.append(time.perf_counter() - began_s)
            for copying in begun:
                copying.wait()
            took_s.append(time.perf_counter() - began_s)
        rate = number * CHUNK_BYTES / median(took_s[1:]) / 1e9
        share = rate / bus[kind]
        is_asked = "PyTorch" not in name and number == 128
        limit = f">= {LIMIT:g} x bus" if is_asked else ""
        shown = f"{rate:.1f} GB/s, {share:.3f} x bus, host {median(host_s[1:]) * 1e3:.2f} ms"
        report.note(f"{kind}, {name}", {"gb_s": rate, "share": share, "host_ms": median(host_s[1:]) * 1e3}, shown,
                    limit, share >= LIMIT if is_asked else None)  # fmt: skip
    is_equal = all(
        torch.equal(layer[torch.tensor(source, device="cuda")], layer[torch.tensor(target, device="cuda")])
        for layer in copier._paged.layers
    )
    report.note(f"came back bit for bit, {name}", is_equal, str(is_equal), is_met=is_equal)
