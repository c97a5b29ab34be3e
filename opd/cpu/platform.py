"""What verl asks about a device, answered for the CPU."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _resident_bytes() -> int:
    """Memory that this process holds now; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _peak_resident_bytes() -> int:
    # Kilobytes on Linux, bytes on macOS; the kernel updates it a little late.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(peak, _resident_bytes())


def _memory_info(device: Any = None) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """`torch.cpu` plus the functions of `torch.cuda` that verl calls; memory is the process's resident memory."""
    module = types.ModuleType("opd.cpu.device", "torch.cpu with the memory functions of torch.cuda")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    module.__dict__.update(
        memory_allocated=lambda device=None: _resident_bytes(),
        memory_reserved=lambda device=None: _resident_bytes(),
        max_memory_allocated=lambda device=None: _peak_resident_bytes(),
        max_memory_reserved=lambda device=None: _peak_resident_bytes(),
        mem_get_info=_memory_info,
        reset_peak_memory_stats=_nothing,
        empty_cache=_nothing,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        get_device_name=lambda device=None: "CPU",
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One process, one "device"; Ray schedules it as a logical GPU."""

    _module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never auto-detected: only VERL_PLATFORM=cpu chooses this platform

    def current_device(self) -> Any:
        # Not the index 0: verl hands this to tensor.to(), where a plain int means an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # verl's Worker reads this one whatever the platform

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl's resource check counts "GPU" and "NPU" only, so the logical resource has to carry that name.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
