"""The decode worker as a Ray actor."""

from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from kvferry.config import DeploymentConfig
from worker.actor import WorkerActor


class DecodeActor(WorkerActor):
    """Hosts one decode worker."""

    role = "decode"

    def make(self, config: DeploymentConfig, engine: Engine, worker_id: str) -> DecodeWorker:
        return DecodeWorker(config.decode, engine, worker_id, config.model_name)
