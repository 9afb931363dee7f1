"""A deployment described in one YAML file, validated once.

    model: smollm2-135m-instruct      # the demo model, a local directory or a hub id
    router: {http_port: 8000}
    prefill: {count: 2, resources: {num_cpus: 1}}
    decode: {count: 1, engine: {num_blocks: 4096}}

Every value has a default. An unknown or ill-typed key is a `ConfigError` that names the key and the
nearest known one.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

DEMO_MODEL = "smollm2-135m-instruct"

Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigError(ValueError):
    """A deployment description that cannot be used; the message says which key and why."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineConfig(_Settings):
    """One model on one device."""

    kind: Literal["transformers", "fake"] = Field(
        "transformers", description="`fake` answers by arithmetic that can be done by hand; for tests."
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Of weights and KV cache; `auto` is what the model's files say."
    )
    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="Tokens in a KV block.")
    num_blocks: PositiveInt | None = Field(None, description="Blocks in the KV cache.")
    kv_cache_bytes: PositiveInt | None = Field(None, description="The KV cache in bytes.")
    kv_cache_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="The KV cache as a share of the free memory; by default 0.9 on CUDA, 0.1 on CPU."
    )
    num_threads: PositiveInt | None = Field(None, description="CPU threads; by default the worker's CPUs.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")

    @model_validator(mode="after")
    def _one_size(self) -> "EngineConfig":
        given = [
            n for n in ("num_blocks", "kv_cache_bytes", "kv_cache_share") if getattr(self, n) is not None
        ]
        if len(given) > 1:
            raise ValueError(
                f"give one of {' and '.join(given)}, not {len(given)}: each sets the cache's size"
            )
        return self

    def with_threads(self, num_threads: int) -> "EngineConfig":
        """The same settings, with `num_threads` filled in where it is not set."""
        return self.model_copy(update={"num_threads": self.num_threads or num_threads})


class Resources(_Settings):
    """What Ray sets aside for one worker."""

    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    custom: dict[str, PositiveFloat] = Field(
        default_factory=dict, description="Ray custom resources, such as `prefill_node: 1`."
    )


class _Pool(_Settings):
    count: PositiveInt = 1
    host: str = Field("127.0.0.1", description="Address to bind to; `auto` takes the node's own address.")
    resources: Resources = Resources()
    engine: EngineConfig = EngineConfig()
    max_step_tokens: PositiveInt = Field(
        512, description="Prompt tokens computed in one step: the largest chunk."
    )


QueuePolicyName = Literal["priority", "fcfs", "shortest", "deadline"]


class PrefillConfig(_Pool):
    """The prefill pool."""

    policy: QueuePolicyName = Field(
        "priority",
        description="Order of the prompts on a worker: `priority`, the higher class first and each at least"
        " its share, in it the shortest first; `fcfs`, by arrival; `shortest`, and a quarter to the oldest;"
        " `deadline`, whose first token is due first.",
    )
    max_waiting: PositiveInt = Field(
        256,
        description="Requests that may wait on one worker; more are refused, and the router tries another.",
    )


class DecodeConfig(_Pool):
    """The decode pool."""

    max_batch_size: PositiveInt = Field(64, description="Sequences decoded in one step, at most.")
    step_target_s: PositiveFloat | None = Field(
        None,
        description="How long a decode step should take: the batch grows by one while steps are quicker, and "
        "halves when one is not. By default the batch is always as large as `max_batch_size` lets it be.",
    )


class RouterConfig(_Settings):
    """The router."""

    host: str = Field("127.0.0.1", description="Address to bind to.")
    grpc_port: Port = Field(50051, description="0 takes a free port.")
    http_port: Port = Field(8000, description="0 takes a free port.")
    policy: QueuePolicyName = Field(
        "priority", description="Order of the requests that wait for room; as in the prefill pool."
    )
    max_queued: PositiveInt = Field(
        256, description="Requests that may wait for room; more get 429 / RESOURCE_EXHAUSTED at once."
    )
    queue_timeout_s: PositiveFloat = Field(30, description="Longest wait for room, then 429.")
    request_timeout_s: PositiveFloat = Field(600, description="Deadline of a request that brings none.")
    max_body_bytes: PositiveInt = Field(4 * 2**20, description="Largest HTTP body and gRPC message.")


class DeploymentConfig(_Settings):
    """A router, a prefill pool and a decode pool for one model."""

    model: str = DEMO_MODEL
    served_name: str | None = Field(None, description="The name that clients use; by default the model's.")
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.model).name


def load(path: Path) -> DeploymentConfig:
    """Reads a deployment from a YAML file. Raises `ConfigError`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse({} if values is None else values, source=str(path))


def parse(values: object, source: str = "configuration") -> DeploymentConfig:
    """Validates a deployment given as plain data. Raises `ConfigError`, its message led by `source`."""
    try:
        return DeploymentConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(e)}" for e in error.errors())) from error


def _explain(error: Any) -> str:
    location = ".".join(str(part) for part in error["loc"]) or "top level"
    if error["type"] != "extra_forbidden":
        return f"{location}: {error['msg']} (got {error['input']!r})"
    known = _fields_at(error["loc"][:-1])
    nearest = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0)
    return f"{location}: unknown key; the nearest known one is {nearest[0]!r}"


def _fields_at(location: tuple[str | int, ...]) -> list[str]:
    model: type[BaseModel] = DeploymentConfig
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        model = annotation
    return list(model.model_fields)
