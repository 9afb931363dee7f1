"""What to do with a step that failed: find the chunk at fault, so that it fails alone."""

from collections.abc import Sequence

from engine.engine import Chunk, Engine, SampledToken


def step_each(engine: Engine, chunks: Sequence[Chunk]) -> list[SampledToken | Exception | None]:
    """The same step, one chunk at a time: the exception of a chunk that fails stands in its place.

    A step may be repeated: it writes the same KV into the same blocks.
    """
    results: list[SampledToken | Exception | None] = []
    for chunk in chunks:
        try:
            results += engine.step([chunk])
        except Exception as error:  # noqa: BLE001 - the caller ends the chunk's request with it
            results.append(error)
    return results
