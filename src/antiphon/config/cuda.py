"""How many NVIDIA GPUs this machine has, asked in one way by whatever depends on it. Imports no CUDA library."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

SMI_TIMEOUT_S = 2.0
"""nvidia-smi answers in a tenth of a second, and hangs where the driver does."""


@functools.cache
def num_cuda_devices(dev: Path = Path("/dev")) -> int:
    """NVIDIA GPUs of this machine, looked for once a process.

    Device files are counted; where there are none (WSL2 has one file for all GPUs), nvidia-smi is asked if it exists.
    """
    num_files = len(list(dev.glob("nvidia[0-9]*")))
    smi = None if num_files else shutil.which("nvidia-smi")
    if smi is None:
        return num_files
    try:
        done = subprocess.run(
            [smi, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
