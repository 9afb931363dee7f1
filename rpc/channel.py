"""Client channels: one for each peer, all with the same limits."""

import grpc

# A peer's own errors and chunks of tokens are small; only KV blocks need more, and say so.
DEFAULT_MAX_MESSAGE_BYTES = 4 * 2**20


# A peer that stops without closing its connections (a stopped process, a cut cable) answers no ping: a stream
# to it breaks after at most the sum of the two.
PING_EVERY_MS = 2000
PING_TIMEOUT_MS = 4000


def options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Channel and server options: message limits, quick reconnection, no proxy between peers, pings."""
    return [
        ("grpc.keepalive_time_ms", PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        # Core waits for the longer of the two, and this one is a minute where it is not set.
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # A stream may be quiet for long, and the other side must not take the pings of it for an attack.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        # What is sent is ours; the receiver is who must be protected.
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]


class Channels:
    """Keeps one channel open to each address. Not thread-safe."""

    def __init__(self, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        self._options = options(max_message_bytes)
        self._channels: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), opened at first use."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=self._options)
        return channel

    async def drop(self, address: str) -> None:
        """Closes the channel to a peer that is gone, with every call on it."""
        if channel := self._channels.pop(address, None):
            await channel.close(None)

    async def close(self) -> None:
        """Closes all channels."""
        for address in list(self._channels):
            await self.drop(address)
