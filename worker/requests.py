"""What both kinds of worker check of a request before anything of it is taken up."""

import math

import grpc

from kvferry.v1 import decode_pb2, prefill_pb2
from rpc.errors import Refused


def tokens_of(request: decode_pb2.ReserveRequest | prefill_pb2.PrefillRequest, vocab_size: int) -> list[int]:
    """The prompt, then the output so far. Raises `Refused`, which names the field at fault.

    A deadline that never comes would hold blocks for ever, and a token that the model has not would read
    past its embeddings: on a GPU that ends the whole process.
    """
    if not request.request_id or not request.prompt_token_ids:
        field = "prompt_token_ids" if request.request_id else "request_id"
        raise _invalid(f"{field}: must not be empty")
    if not math.isfinite(request.deadline_s):
        raise _invalid(f"deadline_s: {request.deadline_s} is no number of seconds from now")
    for field in ("prompt_token_ids", "output_token_ids"):
        token_ids = getattr(request, field)
        if token_ids and max(token_ids) >= vocab_size:
            raise _invalid(f"{field}: {max(token_ids)} is no token; the model has {vocab_size}")
    return [*request.prompt_token_ids, *request.output_token_ids]


def _invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
