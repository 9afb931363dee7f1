"""The prefill worker as a Ray actor."""

from engine.engine import Engine
from kvferry.config import DeploymentConfig
from prefill_worker.worker import PrefillWorker
from worker.actor import WorkerActor


class PrefillActor(WorkerActor):
    """Hosts one prefill worker."""

    role = "prefill"

    def make(self, config: DeploymentConfig, engine: Engine, worker_id: str) -> PrefillWorker:
        return PrefillWorker(config.prefill, engine, worker_id, config.model_name)
