"""What the router counts, as Prometheus metrics; the workers' numbers come with their load reports."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.results import Moment
from router.worker import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One router's metrics."""

    def __init__(self, workers: Iterable[Worker], num_queued: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvferry_requests", "Requests that ended, by outcome.", ["outcome"], registry=self._registry
        )
        self._prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Tokens of accepted prompts.", registry=self._registry
        )
        self._output_tokens = Counter(
            "kvferry_output_tokens", "Tokens sent to clients.", registry=self._registry
        )
        self._recoveries = Counter(
            "kvferry_recoveries",
            "Requests that carried on after the loss of a worker.",
            registry=self._registry,
        )
        self._moments = Histogram(
            "kvferry_moment_seconds",
            "Seconds from a request's arrival to each moment of its life; first_token is TTFT.",
            ["moment"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.running = Gauge("kvferry_requests_running", "Requests in the router.", registry=self._registry)
        queued = Gauge("kvferry_requests_queued", "Requests that wait for room.", registry=self._registry)
        queued.set_function(num_queued)
        self._registry.register(_WorkerCollector(workers))

    def accepted(self, num_prompt_tokens: int) -> None:
        """A request passed validation."""
        self._prompt_tokens.inc(num_prompt_tokens)

    def sent(self, num_tokens: int) -> None:
        """Tokens went to a client."""
        self._output_tokens.inc(num_tokens)

    def recovered(self) -> None:
        """A request carries on after it has lost a worker."""
        self._recoveries.inc()

    def ended(self, outcome: str, moments: Iterable[Moment]) -> None:
        """A request ended: "stop", "length", "cancelled" or the error's name."""
        self._requests.labels(outcome).inc()
        for moment in moments:
            self._moments.labels(moment.name).observe(moment.at_s)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _WorkerCollector(Collector):
    def __init__(self, workers: Iterable[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        blocks = GaugeMetricFamily(
            "kvferry_blocks",
            "KV blocks by who holds them: free + cached + reserved + running = total.",
            labels=[*labels, "state"],
        )
        requests = GaugeMetricFamily(
            "kvferry_worker_requests", "Requests on a worker, waiting and running.", labels=[*labels, "state"]
        )
        events = CounterMetricFamily(
            "kvferry_worker_events", "What a worker counts, by name.", labels=[*labels, "event"]
        )
        for worker in self._workers:
            names = [worker.worker_id, "prefill" if worker.is_prefill else "decode"]
            for state in ("free", "cached", "reserved", "running", "total"):
                blocks.add_metric([*names, state], getattr(worker.load.blocks, state))
            requests.add_metric([*names, "waiting"], worker.load.num_waiting)
            requests.add_metric([*names, "running"], worker.load.num_running)
            for event, count in sorted(worker.load.counters.items()):
                events.add_metric([*names, event], count)
        yield from (blocks, requests, events)
