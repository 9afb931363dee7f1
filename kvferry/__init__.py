"""kvferry: large language models served by separate prefill and decode pools."""
