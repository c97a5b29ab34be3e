"""verl 0.9 without an accelerator, through verl's own plug-in points: nothing of verl is patched or copied.

Importing this package registers everything, in the driver and (through VERL_USE_EXTERNAL_MODULES) in every Ray process:

    platform.py   what verl asks about the device             PlatformRegistry            VERL_PLATFORM=cpu
    rollout.py    the rollout replica and its weight sync     RolloutReplicaRegistry,     rollout.name=cpu
                                                              rollout class registry
    server.py     the Ray actor behind it: collects waiting requests, runs them as one batch
    generate.py   the decode loop; torch and transformers only
    agent_loop.py verl's agent loops with less overhead per row     rollout.agent.agent_loop_manager_class
    collect.py    many single calls become few batched ones
    worker.py     CpuWorker, in place of verl's ActorRolloutRefWorker: give it to the trainer as Role.ActorRollout
    settings.py   ENV and OVERRIDES, the environment variables and Hydra overrides that a CPU run needs

Not covered: a reference or reward model on the CPU, a critic, a rollout with LoRA adapters that are not merged, images,
speed on models beyond a few hundred million parameters.
"""

from __future__ import annotations

import os

from .settings import ENV, ROLLOUT_NAME

# Before verl is imported: it reads these while it loads. A value that the user exported wins.
for _name, _value in ENV.items():
    os.environ.setdefault(_name, _value)

from verl.plugin.platform import get_platform  # noqa: E402
from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry  # noqa: E402

from .platform import CpuPlatform  # noqa: E402


def _load_replica() -> type[RolloutReplica]:
    from .rollout import CpuReplica

    return CpuReplica


def register() -> None:
    """Enter the rollout into verl's registries; the platform registers itself where it is defined."""
    # verl has no function to register a rollout class; its own backends are entries of this dict too.
    _ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "opd.cpu.rollout.CpuRollout"
    RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)


register()

if not isinstance(get_platform(), CpuPlatform):
    raise RuntimeError(
        f"verl chose the platform {type(get_platform()).__name__}, not CpuPlatform "
        f"(VERL_PLATFORM={os.environ['VERL_PLATFORM']!r}); import opd.cpu before verl, and unset VERL_PLATFORM"
    )
