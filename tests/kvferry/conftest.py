"""A gRPC server that plays the router."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvferry.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
)


class Router(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers by the text of the prompt: `fail CODE`, `hang`, `cut`, or three tokens for anything else."""

    def __init__(self):
        self.requests = queue.Queue()
        self.ended = threading.Event()
        self.audit = admin_pb2.AuditDeploymentResponse(router_id="r1")

    def Generate(self, request, context):
        self.requests.put(request)
        context.add_callback(self.ended.set)
        if request.text.startswith("fail "):
            code = grpc.StatusCode[request.text.split()[1]]
            if request.text.endswith("retry"):
                context.set_trailing_metadata([("retry-after", "7")])
            context.abort(code, f"said {code.name}")
        accepted = inference_pb2.Accepted(request_id="r-1", model="tiny", num_prompt_tokens=4)
        yield inference_pb2.GenerateResponse(accepted=accepted)
        if request.text == "fault half-way":
            context.abort(grpc.StatusCode.INTERNAL, "a fault")
        for text, ids in (("Hel", [5]), ("", [6]), ("lo", [7])):
            logprobs = [
                common_pb2.TokenLogprobs(
                    logprob=-i / 2, top=[common_pb2.TopLogprob(token_id=i, logprob=-0.25)]
                )
                for i in ids
                if request.sampling.logprobs
            ]
            delta = inference_pb2.Delta(text=text, token_ids=ids, logprobs=logprobs)
            yield inference_pb2.GenerateResponse(delta=delta)
            if request.text == "hang":
                self.ended.wait(30)
                return
        if request.text == "cut":
            return
        finished = inference_pb2.Finished(
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            usage=inference_pb2.Usage(num_prompt_tokens=4, num_output_tokens=3),
            moments=[
                inference_pb2.Moment(name="received"),
                inference_pb2.Moment(name="first_token", at_s=0.5, worker_id="prefill-0"),
            ],
        )
        yield inference_pb2.GenerateResponse(finished=finished)

    def ListWorkers(self, request, context):
        worker = admin_pb2.WorkerStatus(
            registration=registry_pb2.Registration(
                worker_id="decode-0", epoch=9, role=common_pb2.ROLE_DECODE, address="127.0.0.1:1"
            ),
            load=registry_pb2.LoadReport(
                blocks=common_pb2.BlockCounts(free=60, reserved=1, running=3, total=64), num_running=2
            ),
            report_age_s=0.25,
            incompatible="block_size: 16 here, 32 on prefill-0",
        )
        return admin_pb2.ListWorkersResponse(model="tiny", num_requests=3, num_queued=1, workers=[worker])

    def AuditDeployment(self, request, context):
        return self.audit


@pytest.fixture
def router():
    return Router()


@pytest.fixture
def address(router):
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    router.ended.set()
    server.stop(0).wait()
