"""Environment variables that Ray reads when it is imported, and those that its workers get."""

import os
import secrets
import sys

from kvferry.config import Resources


def on_a_cluster() -> bool:
    """Whether this process is to join a running Ray cluster: `RAY_ADDRESS` is set, as in a Ray job."""
    return bool(os.environ.get("RAY_ADDRESS"))


def prepare() -> None:
    """Sets what this process has not set itself. Raises RuntimeError where Ray has read it already."""
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SCHEDULER_EVENTS": "0", "RAY_DEDUP_LOGS": "0"}
    if not on_a_cluster():
        # A cluster of one machine listens on loopback only: whoever reaches Ray's ports can run code.
        wanted["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Left alone, Ray would keep its password in a file in the user's home, for all clusters to come.
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # An actor that was given no GPU sees none.
        wanted["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    if missing and "ray" in sys.modules:
        # Its servers would ask for a token of which this process knows nothing.
        raise RuntimeError(f"Ray was imported before its environment was set: {', '.join(missing)}")
    os.environ.update(missing)


# How torch's allocator deals with a GPU's memory; the second is the name that older releases know.
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def of_actor(resources: Resources | None) -> dict[str, str]:
    """The variables of one actor's process beside its node's; None stands for the router.

    Without a GPU there are none on this machine: the actor takes a process that Ray has started already,
    and Ray itself sets OMP_NUM_THREADS to the actor's CPUs.

    With one, torch's allocator grows its segments in place. A step's activations differ in size from step
    to step, and holes between fixed segments would be lost to them: a chunk then runs out of memory that
    is there. What the launcher's own environment says of the allocator goes before.
    """
    if resources is not None and resources.num_gpus > 0:
        own = {name: os.environ[name] for name in _ALLOCATOR_SETTINGS if name in os.environ}
        return own or {_ALLOCATOR_SETTINGS[0]: "expandable_segments:True"}
    if on_a_cluster() and (resources is None or resources.num_gpus == 0):
        # Ray hides the GPUs that others were given, but not from an actor that was given none.
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {}
