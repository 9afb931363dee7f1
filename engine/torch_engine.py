"""The engine for transformers models: one packed forward a step over a paged KV cache."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedModel

from engine import probe
from engine.attention import AttentionBackend, PagedStep, choose_backend, compute_logits
from engine.batch import Batch
from engine.cache import KVCache
from engine.choice import KernelChoice, TorchChoice
from engine.engine import Chunk, ModelInfo, OutOfMemory, SampledToken
from engine.kernels import load_kernels
from engine.memory import num_blocks
from engine.model import load_model
from engine.sampler import Sampler
from kvferry.config import EngineConfig

logger = logging.getLogger(__name__)

# How torch's CPU allocator and the C++ library say it.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "bad_alloc")


class TorchEngine:
    """A transformers model on one device. Implements `engine.engine.Engine`."""

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, cache: KVCache, backend: AttentionBackend
    ) -> None:
        self.info = info
        self.cache = cache
        self._model = model
        self._backend = backend
        self._device = cache.blocks.device
        on_kernels = self._device.type == "cpu" and load_kernels()
        choice = KernelChoice() if on_kernels else TorchChoice(info.vocab_size)
        self._sampler = Sampler(info.vocab_size, info.eos_token_ids, choice)

    @classmethod
    def load(cls, config: EngineConfig, folder: Path) -> Self:
        """Loads and tries out the model in `folder`. Takes seconds.

        Raises `UnsupportedModel` for a model that cannot run here, and `ValueError` for files, a device
        or a cache size that cannot be had.
        """
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded = load_model(config, folder)
        shape, softcap = probe.measure(loaded.model, config.block_size)
        backend = choose_backend(shape, loaded.device, softcap)
        probe.check(loaded.model, backend, shape)
        cache = KVCache(shape, num_blocks(config, shape, loaded.device), loaded.device)
        logger.info(
            "%s on %s in %s: %d blocks of %d tokens (%d bytes each), %s attention",
            folder.name,
            loaded.device,
            shape.dtype,
            cache.num_blocks,
            shape.block_size,
            shape.num_bytes,
            backend.name,
        )
        return cls(loaded.model, loaded.info, cache, backend)

    def step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        """As `Engine.step`."""
        if not chunks:
            return []
        try:
            return self._step(chunks)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            message = str(error)
        except MemoryError as error:
            message = str(error) or "host memory"
        # Raised out here because the original's traceback keeps the step's tensors alive.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory(message)

    @torch.inference_mode()
    def _step(self, chunks: Sequence[Chunk]) -> list[SampledToken | None]:
        batch = Batch.pack(chunks, self.cache.shape.block_size, self._device)
        logits = compute_logits(self._model, batch, PagedStep(self.cache, self._backend, batch))
        sampled = iter(self._sampler.sample(logits, [c for c in chunks if c.sampling is not None]))
        return [None if chunk.sampling is None else next(sampled) for chunk in chunks]


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)
