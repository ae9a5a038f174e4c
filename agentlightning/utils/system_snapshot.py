"""Metrics of this host, as the dictionary in a worker's heartbeat, and CPU seconds of named threads."""

from __future__ import annotations

import functools
import platform
import shutil
import socket
import subprocess
import threading
import time
from datetime import datetime

GIB = 1024**3
MIB = 1024**2


def system_snapshot(include_gpu: bool = False) -> dict[str, object]:
    """Return processor, memory, disk and network metrics of this host; sizes in GiB and MiB, fractions in percent.

    With `include_gpu`, the result also has `gpus`, with one entry per readable NVIDIA GPU. It takes a few milliseconds
    without GPUs and up to two seconds with GPUs.
    """
    import psutil  # 15 ms that an importer of the package need not pay

    memory, disk, network = psutil.virtual_memory(), psutil.disk_usage("/"), psutil.net_io_counters()
    snapshot = {
        **_host(),
        "timestamp": datetime.now().isoformat(timespec="seconds"),
        "cpu_usage_pct": psutil.cpu_percent(interval=None),
        "mem_used_gb": round(memory.used / GIB, 2),
        "mem_total_gb": round(memory.total / GIB, 2),
        "mem_pct": memory.percent,
        "disk_used_gb": round(disk.used / GIB, 2),
        "disk_total_gb": round(disk.total / GIB, 2),
        "disk_pct": disk.percent,
        "bytes_sent_mb": round(network.bytes_sent / MIB, 2) if network else 0.0,
        "bytes_recv_mb": round(network.bytes_recv / MIB, 2) if network else 0.0,
    }
    if include_gpu:
        snapshot["gpus"] = _gpus()
    return snapshot


@functools.cache
def memory_capacity_bytes() -> int:
    """Return the bytes of memory that this process may use: those of the machine, or of its control group if less."""
    import psutil

    capacity = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                capacity = min(capacity, int(file.read()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return capacity


@functools.cache
def _host() -> dict[str, object]:
    """Return the metrics that do not change while the process runs."""
    import psutil

    return {
        "host": socket.gethostname(),
        "os": f"{platform.system()} {platform.release()}",
        "cpu_name": platform.processor() or platform.machine(),
        "cpu_cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "cpu_threads": psutil.cpu_count() or 1,
    }


def _gpus() -> list[dict[str, object]]:
    """Return the GPUs that `nvidia-smi` reports; none without it, or if it does not finish within two seconds."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "name,utilization.gpu,memory.used,memory.total,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    keys = ("util_pct", "mem_used_mb", "mem_total_mb", "temp_c")
    parts = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") == 4]
    return [{"gpu": name, **dict(zip(keys, map(_number, figures), strict=True))} for name, *figures in parts]


def _number(text: str) -> float | None:
    """Return a number, or None if the driver reports `[N/A]`."""
    try:
        return float(text)
    except ValueError:
        return None


def thread_cpu_seconds(prefixes: tuple[str, ...]) -> float:
    """Return the CPU time that the running threads with these names have used so far; 0.0 if it cannot be read."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(prefixes) and thread.ident is not None:
            try:
                total += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except (AttributeError, OSError):  # not offered here, or the thread has just ended
                continue
    return total
