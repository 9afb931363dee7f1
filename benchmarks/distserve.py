"""DistServe's published case in our simulator: OPT-13B on A100s, prefill TP2, decode TP1.

python -m benchmarks.distserve --profiles ../shared/profiles/a100-80g.distserve.json

The artifact (Zhong et al., OSDI'24) gives 1.56 requests/s for each GPU as its expected result, where 90 % of
the requests have TTFT in 200 ms and TPOT in 100 ms, from cost models of the same form as ours. Its request
lengths are not published with it. Assumed here: log-normal lengths with the means that the paper gives for
ShareGPT, cut so that prompt and output fit the model's 2,048 tokens; Poisson arrivals; whole prompts, first
come first served, batched up to 2,048 tokens a step; transfers that take no time; the published KV sizes.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvferry import config as settings
from simulator import costs
from simulator.plan import Setting, Targets, attains, highest_rate
from simulator.traces import TraceRequest

PUBLISHED = 1.56
MODEL = "facebook/opt-13b"
MAX_CONTEXT_TOKENS = 2048
PROMPT_MEAN, OUTPUT_MEAN, SPREAD = 755.5, 200.3, 1.0
BLOCK_SIZE = 16
# Of OPT-13B on an A100-80G, in tokens, as published: TP2 for prefill and TP1 for decode.
PREFILL_TOKENS, DECODE_TOKENS = 163_008, 66_144
QUICK_REQUESTS, NUM_REQUESTS = 500, 3000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    profiles: Annotated[Path, typer.Option(help="The published coefficients.")] = Path(
        "../shared/profiles/a100-80g.distserve.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_REQUESTS} requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Our goodput for each GPU beside the published one."""
    if not profiles.is_file():
        sys.stderr.write(f"{profiles} is not there\n")
        raise typer.Exit(2)
    config = settings.parse(
        {
            "router": {"max_queued": 10**6, "queue_timeout_s": 10**6},
            "prefill": {
                "policy": "fcfs",
                "max_step_tokens": MAX_CONTEXT_TOKENS,
                "max_waiting": 10**6,
                "engine": {"num_blocks": PREFILL_TOKENS // BLOCK_SIZE},
            },
            "decode": {"max_batch_size": 256, "engine": {"num_blocks": DECODE_TOKENS // BLOCK_SIZE}},
        }
    )
    trace = _trace(QUICK_REQUESTS if quick else NUM_REQUESTS)
    targets = Targets(0.2, 0.1, 0.9)
    known = costs.load(profiles, MODEL, 2, 1)
    rows = []
    for setting in (Setting(1, 1, 2, 1), Setting(1, 2, 2, 1)):
        rate = highest_rate(attains(setting.apply(config), known, trace, targets))
        rows.append(
            {
                "prefill": setting.num_prefill,
                "decode": setting.num_decode,
                "rate_per_gpu": rate / setting.num_devices,
                "of_published": rate / setting.num_devices / PUBLISHED,
            }
        )
    if as_json:
        sys.stdout.write(json.dumps({"published": PUBLISHED, "rows": rows}, indent=2) + "\n")
        return
    for row in rows:
        sys.stdout.write(
            f"{row['prefill']} prefill worker TP2, {row['decode']} decode TP1: {row['rate_per_gpu']:.2f} "
            f"requests/s for each GPU; published: {PUBLISHED} ({row['of_published']:.0%})\n"
        )


def _trace(num_requests: int) -> list[TraceRequest]:
    generator = random.Random(0)

    def length(mean: float, most: int) -> int:
        drawn = generator.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return max(2, min(most, round(drawn)))

    at_s, trace = 0.0, []
    for _ in range(num_requests):
        at_s += generator.expovariate(1.0)
        num_prompt = length(PROMPT_MEAN, MAX_CONTEXT_TOKENS - 2)
        trace.append(TraceRequest(at_s, num_prompt, length(OUTPUT_MEAN, MAX_CONTEXT_TOKENS - num_prompt)))
    return trace


if __name__ == "__main__":
    app()
