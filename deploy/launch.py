"""Brings a deployment up on a Ray cluster and keeps it up until it is told to end.

    python -m deploy.launch deploy/cluster.yaml

Joins the cluster that `RAY_ADDRESS` names, as `ray job submit` has it, and starts one on this machine
otherwise. SIGINT and SIGTERM end every process within seconds, with exit status 0.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import environment, signals
from kvferry import config as settings
from kvferry import models

if TYPE_CHECKING:
    from deploy.deployment import Addresses, Deployment

Say = Callable[[str], None]
Job = Callable[["Addresses"], Awaitable[None]]


class LaunchFailed(Exception):
    """The deployment could not be brought up; the message says why. Nothing of it is left."""


def run(
    config: settings.DeploymentConfig, say: Say, job: Job | None = None, *, show_logs: bool = True
) -> bool:
    """Brings the deployment up, does `job` (or keeps it up, where there is none) and ends it.

    Returns whether the job was done; False when a signal ended it. `say` gets lines for the user;
    `show_logs` shows them what the actors log too. Call it in the main thread. Raises `LaunchFailed`,
    `ModelNotFound`, and whatever the job raises.
    """
    try:
        with signals.as_interrupts():
            return _launch(config, say, job, show_logs)
    except (KeyboardInterrupt, SystemExit):
        # The latter is how Ray, once it is up, answers SIGTERM outside of our event loop.
        return False


def _launch(config: settings.DeploymentConfig, say: Say, job: Job | None, show_logs: bool) -> bool:
    if not environment.on_a_cluster():
        # Sooner than the workers would, who do it each on its node.
        models.resolve(config.model)
    environment.prepare()
    say("joining the Ray cluster" if environment.on_a_cluster() else "starting Ray")
    # Here, because Ray reads its environment when it is imported.
    from deploy.cluster import Cluster, ClusterUnavailable, request_of
    from deploy.deployment import Deployment
    from deploy.member import StartFailed

    pools = (config.prefill, config.decode)
    requests = [request_of(pool.resources) for pool in pools for _ in range(pool.count)]
    try:
        with Cluster(requests, show_logs=show_logs) as cluster:
            return asyncio.run(_run(lambda: Deployment(cluster, config, say), say, job))
    except (ClusterUnavailable, StartFailed) as error:
        raise LaunchFailed(str(error)) from error


def say_with_time() -> Say:
    """Writes lines to standard output, each with the seconds since now."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began_s:6.1f} s  {line}\n")
        sys.stdout.flush()

    return say


async def _run(make: "Callable[[], Deployment]", say: Say, job: Job | None) -> bool:
    deployment = make()
    work = asyncio.create_task(_work(deployment, say, job))
    loop = asyncio.get_running_loop()
    for number in signals.ENDING:
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
        return True
    except asyncio.CancelledError:
        return False
    finally:
        for number in signals.ENDING:
            # A second Ctrl-C must not stop the clean-up half-way.
            loop.add_signal_handler(number, lambda: None)
        await deployment.stop()


async def _work(deployment: "Deployment", say: Say, job: Job | None) -> None:
    addresses = await deployment.start()
    say(f"ready: gRPC at {addresses.grpc}, HTTP at http://{addresses.http}")
    supervision = asyncio.create_task(deployment.supervise())
    try:
        await (job(addresses) if job else supervision)
    finally:
        supervision.cancel()


def main() -> int:
    """The command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        run(settings.load(Path(sys.argv[1])), say_with_time())
    except (settings.ConfigError, models.ModelNotFound, LaunchFailed) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
