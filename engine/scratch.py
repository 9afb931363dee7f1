"""Memory that is used again at every step: fresh pages would cost more than the work done in them."""

import torch


class Scratch:
    """Named float32 buffers, each as large as the largest use of it so far."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def rows(self, name: str, num_rows: int, length: int, device: torch.device) -> torch.Tensor:
        """[num_rows, length], of undefined content; the same memory as at the last call with `name`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_rows * length or buffer.device != device:
            buffer = torch.empty(num_rows * length, dtype=torch.float32, device=device)
            self._buffers[name] = buffer
        return buffer[: num_rows * length].view(num_rows, length)
