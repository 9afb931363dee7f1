"""One actor of a deployment: placed, started, watched and stopped."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from deploy import environment
from deploy.cluster import Cluster, describe, request_of
from kvferry.config import Resources

State = Literal["waiting for resources", "starting", "ready", "lost"]
Say = Callable[[str], None]

REPORT_S = 10.0
# On a cluster of one machine nobody else will give anything back.
LOCAL_PATIENCE_S = 5.0
POLL_S = 0.05
CALL_TIMEOUT_S = 10.0

# Exceptions from these packages say all there is to say, as do the system's; others need their traceback.
_PACKAGES = {
    "kvferry",
    "engine",
    "kv_transfer",
    "scheduling",
    "rpc",
    "router",
    "prefill_worker",
    "decode_worker",
}


class StartFailed(Exception):
    """A member that could not be placed or started; the message names it and the cause."""


class Lost(Exception):
    """A member that died or does not answer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make a member of.

    load: called in the actor's process, so that the launcher need not import what the actor needs; returns
    a class with async methods `start` and `address`, which return where it listens (`address` None before
    `start`), and `stop`. resources: None for the router, which stays on the launcher's node.
    """

    name: str
    load: Callable[[], type]
    arguments: tuple[Any, ...]
    resources: Resources | None


class ActorHost:
    """What Ray runs: an object of the class that a plan loads."""

    def __init__(self, plan: Plan) -> None:
        self._name = plan.name
        self._actor = plan.load()(*plan.arguments)

    def __repr__(self) -> str:
        # Ray puts this before the lines that the actor logs.
        return self._name

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._actor, method)(*arguments)


class Member:
    """One actor. Ray restarts its process; after that, and at first, `start` must be called."""

    def __init__(self, plan: Plan, cluster: Cluster, say: Say) -> None:
        self.name = plan.name
        self.state: State = "waiting for resources"
        # What `start` returned last.
        self.address: Any = None
        self._plan = plan
        self._cluster = cluster
        self._say = say
        self._request = request_of(plan.resources) if plan.resources else {}
        self._group: PlacementGroup | None = None
        self._actor: Any = None

    async def start(self) -> Any:
        """Places, creates and starts the actor, as far as that is still to be done; returns its address.

        Says so every 10 s while it cannot be placed. Raises `StartFailed`, or `Lost` if it died meanwhile.
        """
        self.state = "waiting for resources"
        await self._place()
        self.state = "starting"
        address = None
        if self._actor is None:
            self._actor = self._create()
        else:
            address = await self.call("address")
        if address is None:
            address = await self._ask("start", None)
        self.address = address
        self.state = "ready"
        return address

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method that answers at once. Raises `Lost`."""
        return await self._ask(method, CALL_TIMEOUT_S, *arguments)

    async def stop(self) -> None:
        """Asks the actor to end well. Raises `Lost`."""
        if self._actor is not None:
            await self.call("stop")

    def kill(self) -> None:
        """Ends the actor at once, for good, and gives its resources back."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    async def _place(self) -> None:
        """Has Ray set the resources aside, which tells a lack of them from a slow start."""
        if not self._request:
            return
        if self._group is None:
            self._group = placement_group([self._request])
        possible = self._cluster.can_hold(self._request)
        began_s = time.monotonic()
        report_s = began_s + (REPORT_S if possible else 0)
        while placement_group_table(self._group)["state"] != "CREATED":
            waited_s = time.monotonic() - began_s
            if self._cluster.is_local and (not possible or waited_s > LOCAL_PATIENCE_S):
                raise StartFailed(self._unplaced())
            if time.monotonic() >= report_s:
                self._say(f"{self._unplaced()} (waiting for {waited_s:.0f} s)")
                report_s += REPORT_S
            await asyncio.sleep(POLL_S)

    def _unplaced(self) -> str:
        lack = "none has free now" if self._cluster.can_hold(self._request) else "none has"
        return (
            f"{self.name} cannot be placed: it asks one node for {describe(self._request)}, which {lack}; "
            f"{self._cluster.describe_nodes()}"
        )

    def _create(self) -> Any:
        resources = self._plan.resources
        strategy: Any = None
        if resources is None:
            strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        elif self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {
            "num_cpus": resources.num_cpus if resources else 0,
            "num_gpus": resources.num_gpus if resources else 0,
            "resources": resources.custom if resources else {},
            "max_restarts": -1,
            "max_task_retries": 0,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": environment.of_actor(resources)},
        }
        return ray.remote(ActorHost).options(**options).remote(self._plan)

    async def _ask(self, method: str, timeout_s: float | None, *arguments: Any) -> Any:
        try:
            return await asyncio.wait_for(self._actor.call.remote(method, *arguments), timeout_s)
        except RayTaskError as error:
            raise StartFailed(f"{self.name} could not {method}: {_cause(error)}") from error
        except TimeoutError:
            self.state = "lost"
            raise Lost(f"{self.name} does not answer") from None
        except ActorUnavailableError:
            self.state = "lost"
            raise Lost(f"{self.name} is lost; Ray restarts it") from None
        except RayError as error:
            self.state = "lost"
            if isinstance(error, ActorDiedError):
                # Ray has given it up: the next `start` makes another.
                self._actor = None
            raise Lost(f"{self.name} is lost: {_last_line(error)}") from error


def _cause(error: RayTaskError) -> str:
    cause = error.cause
    if isinstance(cause, OSError) or type(cause).__module__.split(".")[0] in _PACKAGES:
        return f"{type(cause).__name__}: {cause}"
    return str(error)


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
