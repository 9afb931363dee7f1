"""How our processes log: one line an event on standard error, which Ray gathers."""

import logging


def log_to_stderr() -> None:
    """Logs our own INFO and everybody's WARNING."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for name in ("engine", "kv_transfer", "rpc", "router", "prefill_worker", "decode_worker"):
        logging.getLogger(name).setLevel(logging.INFO)
