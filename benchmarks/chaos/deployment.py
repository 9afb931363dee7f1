"""A deployment on Ray whose peers reach one another over links that can be harmed."""

import psutil

from benchmarks.chaos.link import Link
from deploy.cluster import Cluster
from deploy.deployment import Addresses, Deployment
from deploy.member import Member, Say
from kvferry.config import DeploymentConfig


class LinkedDeployment(Deployment):
    """Each worker is reached, and reaches the router, over a link of its own; so do clients the router.

    to_worker: from the router and from prefill workers, by the worker's name. to_router: from each worker.
    """

    def __init__(self, cluster: Cluster, config: DeploymentConfig, say: Say) -> None:
        super().__init__(cluster, config, say)
        self.to_worker = {member.name: Link() for member in self.workers}
        self.to_router = {member.name: Link() for member in self.workers}
        self._listens_at: dict[str, str] = {}

    @property
    def links(self) -> dict[str, Link]:
        """All links between peers, by what they join."""
        into = {f"router>{name}": link for name, link in self.to_worker.items()}
        return into | {f"{name}>router": link for name, link in self.to_router.items()}

    async def start(self) -> Addresses:
        """See `Deployment`."""
        for link in self.links.values():
            await link.listen()
        return await super().start()

    async def stop(self) -> None:
        """See `Deployment`."""
        await super().stop()
        for link in self.links.values():
            await link.close()

    async def join(self, member: Member, address: str, router: str) -> None:
        """See `Deployment`."""
        self._listens_at[member.name] = address
        self.to_worker[member.name].point_to(address)
        self.to_router[member.name].point_to(router)
        await member.call("publish", self.to_worker[member.name].address)
        await super().join(member, address, self.to_router[member.name].address)

    def processes(self) -> dict[str, psutil.Process]:
        """The living process of each member that serves now."""
        at = dict(self._listens_at)
        if self.addresses is not None:
            at["router"] = self.addresses.grpc
        owners = {
            c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN
        }
        found = {}
        for name, address in at.items():
            if (pid := owners.get(int(address.rpartition(":")[2]))) is not None:
                found[name] = psutil.Process(pid)
        return found
