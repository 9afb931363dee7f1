"""One request's output: token ids from workers in, text for the client out."""

from collections.abc import Sequence

from kvferry.results import FinishReason, TokenLogprobs
from router.detokenizer import Detokenizer
from router.events import Delta, Request
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer


class OutputBuilder:
    """Detokenises, looks for stop strings and counts.

    The output is over once `finish_reason` is set: by a stop string, found here, or by the worker's
    word. A stop string counts only where the token that completes it is at least number `min_tokens`.
    `num_output_tokens` counts up to and including the token that ended the output.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._sampling = request.sampling
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids)
        self._stop_strings = StopStrings(request.sampling.stop)
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        ended: FinishReason | None = None,
    ) -> Delta:
        """Takes the next tokens, and the worker's word that the last of them ended the output.

        logprobs: one entry a token, or none at all. The last token of an output that ended with "stop"
        is an end token: counted, but not shown. Tokens after the one that completes a stop string are
        dropped. Must not be called once `finish_reason` is set.
        """
        if not self._sampling.stop:
            return self._push_all(token_ids, logprobs, ended)
        pieces = []
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            self.num_output_tokens += 1
            if ended == "stop" and num_taken == len(token_ids):
                break
            pieces.append(self._take(self._detokenizer.push([token_id])))
            if self.finish_reason is not None:
                break
        if ended is not None and self.finish_reason is None:
            pieces.append(self._finish(ended))
        return Delta("".join(pieces), list(token_ids[:num_taken]), list(logprobs[:num_taken]))

    def _push_all(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], ended: FinishReason | None
    ) -> Delta:
        """The same where no stop string can cut between tokens: all of them at once."""
        self.num_output_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids[:-1] if ended == "stop" else token_ids)
        if ended is not None:
            self.finish_reason = ended
            text += self._detokenizer.flush()
        return Delta(text, list(token_ids), list(logprobs))

    def _take(self, text: str) -> str:
        may_stop = self.num_output_tokens >= self._sampling.min_tokens
        text, stopped = self._stop_strings.push(text, may_stop)
        if stopped:
            self.finish_reason = "stop"
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._take(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            text += self._stop_strings.flush()
        return text
