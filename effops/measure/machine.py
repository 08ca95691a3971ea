"""What a machine is and has left: the name of a device, and the bytes that can still be allocated."""

import platform
import re
from pathlib import Path

import torch


def device_model(device: torch.device) -> str:
    """The name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    found = re.search(r"^model name\s*:\s*(.+)$", _file_text("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: the device's free memory, or of a CPU what system and container leave."""
    if device.type == "cuda":
        reserved_unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved_unused
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _file_text("/proc/meminfo"), re.MULTILINE))
    limit, used = _file_text("/sys/fs/cgroup/memory.max").strip(), _file_text("/sys/fs/cgroup/memory.current").strip()
    reclaimable = re.search(r"^inactive_file (\d+)$", _file_text("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    bounds = [int(meminfo["MemAvailable"]) * 1024] if "MemAvailable" in meminfo else []
    if limit.isdigit() and used.isdigit():
        bounds.append(int(limit) - int(used) + (int(reclaimable[1]) if reclaimable else 0))
    return max(0, min(bounds)) if bounds else 2**63 - 1


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
