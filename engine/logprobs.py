"""Log probabilities under the model's raw logits, before bias, penalties, temperature and truncation."""

import torch


class RawLogprobs:
    """The natural log probabilities of one row of logits, [vocab_size] float32, which may change later.

    `alternatives` holds the likeliest tokens (id, log probability) in falling order, equal ones by id.
    """

    def __init__(self, logits: torch.Tensor, num_alternatives: int) -> None:
        self._normaliser = torch.logsumexp(logits, dim=0)
        self.alternatives: tuple[tuple[int, float], ...] = ()
        if num_alternatives:
            num = min(num_alternatives, logits.shape[0])
            # Of logits equal to the last, topk takes any: all that are as large compete once more.
            ids = torch.nonzero(logits >= logits.topk(num).values[-1])[:, 0]
            ids = ids[torch.argsort(logits[ids], descending=True, stable=True)[:num]]
            values = logits[ids] - self._normaliser
            self.alternatives = tuple(zip(ids.tolist(), values.tolist(), strict=True))

    def of(self, logit: torch.Tensor) -> float:
        """The log probability of the token with this raw logit."""
        return (logit.float() - self._normaliser).item()
