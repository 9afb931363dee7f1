"""How tokens are chosen: the one definition of the sampling parameters and of their ranges."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20

_TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class _Message(Protocol):
    """A protobuf message: all that this file needs to know of one."""

    def ListFields(self) -> Any: ...  # noqa: N802


class SamplingParams(BaseModel):
    """How tokens are chosen and when the output ends. Field meanings: `proto/kvferry/v1/common.proto`.

    `seed` and `max_tokens` are None until the router fills them in; workers always see both set.
    Raises pydantic's `ValidationError`, which names the field, for anything out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**32)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        Mapping[_TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]],
        Field(max_length=MAX_STOP_STRINGS),
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(
        default_factory=list
    )
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    @classmethod
    def from_message(cls, message: _Message) -> Self:
        """The parameters in a protobuf `SamplingParams`, whose fields have these names."""
        fields = {field.name: value for field, value in message.ListFields()}
        for name in ("stop", "stop_token_ids"):
            if name in fields:
                fields[name] = list(fields[name])
        if "logit_bias" in fields:
            fields["logit_bias"] = dict(fields["logit_bias"])
        return cls.model_validate(fields)

    def to_fields(self) -> dict[str, Any]:
        """Keyword arguments for a protobuf `SamplingParams`."""
        return self.model_dump(exclude_none=True)
